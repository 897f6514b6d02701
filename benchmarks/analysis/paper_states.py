"""What the paper's figures of states show, of a converted model: entropy, likeness, untouched rows, reach, clusters.

    python -m benchmarks.analysis.paper_states out/stories --text text.txt --out states.json      # a CPU, a minute

`sse-convert analyze` has what tells how a conversion went; this has what the paper's analysis adds to it.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.analysis.clustering import Clustering
from benchmarks.analysis.keys import RowSparsity
from benchmarks.analysis.receptive import ReceptiveField
from benchmarks.analysis.similarity import RowSimilarity
from benchmarks.analysis.states import StateEntropy
from sse_convert.analysis.analyze import measure_layers
from sse_convert.analysis.quantity import Quantity
from sse_convert.checkpoints.load_model import context_limit, load_model, load_tokenizer
from sse_convert.cli.runner import reporting_errors
from sse_convert.console import progress
from sse_convert.data.sample_text import check_file, read_text
from sse_convert.files import write_json
from sse_convert.modeling.arch_spec import decoder_config
from sse_convert.report import json_ready

QUANTITIES: tuple[type[Quantity], ...] = (StateEntropy, RowSimilarity, RowSparsity, ReceptiveField, Clustering)
"""of the paper's figures state_entropy, state_sim, row_sparsity, crf and info_cluster"""


def paper_states(
    model: str | Path, text: Path, *, tokens: int = 16384, length: int | None = None
) -> dict[int, dict[str, Any]]:
    """The quantities of each recurrent layer, by its index; arguments as of `sse_convert.api.analyze`."""
    check_file(text)
    loaded = load_model(model)
    config = decoder_config(loaded.config)
    limit = context_limit(config)
    tokenizer = load_tokenizer(model)
    rows = read_text(text, tokenizer, tokens=tokens, length=length, limit=limit, vocab_size=config.vocab_size)
    with progress("states", len(rows.ids)) as bar:
        layers = measure_layers(loaded, rows, bar=bar, kinds=QUANTITIES)
    return {i: json_ready({quantity.name: quantity.result() for quantity in layer}) for i, layer in layers.items()}


@reporting_errors
def main(arguments: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", help="converted checkpoint")
    p.add_argument("--text", type=Path, required=True, help="what it reads")
    p.add_argument("--tokens", type=int, default=16384, help="of the text, at most")
    p.add_argument("--length", type=int, help="tokens per row")
    p.add_argument("--out", type=Path, required=True, help="JSON file to write")
    o = p.parse_args(arguments)
    write_json(o.out, paper_states(o.model, o.text, tokens=o.tokens, length=o.length))


if __name__ == "__main__":
    sys.exit(main())
