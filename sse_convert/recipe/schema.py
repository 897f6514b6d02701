"""The recipe: one YAML file that says what becomes of a checkpoint. Frozen dataclasses, one docstring line per key."""

import dataclasses as dc
from typing import Annotated, Any, Literal

from sse_convert.mixers import BUILT_IN, Mixer, mixer_to_dict, recipe_entry
from sse_convert.recipe.ranges import (
    Count,
    Length,
    NewFolder,
    NotNegative,
    PathText,
    Positive,
    Range,
    Rate,
    Seed,
    Share,
    Tokens,
)

Auto = Literal["auto"]
Loss = Literal["layer_mse", "kl", "ce"]


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Select:
    """Layers or heads that `run` and `convert` choose first, as the command `select` does, of those that would get a
    mixer."""

    keep: str | Annotated[int, Range(1, 4096)]
    """how many of them stay softmax: a number, or a share such as 25%"""
    by: Literal["layers", "heads"] = "layers"
    """what stays: whole layers, or key-value heads, which see the whole row beside others that get the layer's mixer"""
    chosen: (
        list[Annotated[int, Range(0, 4096)]]
        | dict[int | str, list[Annotated[int, Range(0, 4096)]] | Literal["full"]]
        | None
    ) = None
    """what was chosen, as the recipe of a converted model notes it: layers, or heads by layer, `full` for all of one;
    null chooses"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class FullHeads:
    """A layer of which some heads stay softmax."""

    full_heads: list[Annotated[int, Range(0, 4096)]]
    """key-value heads that see the whole row, with the query heads that read them; the others get the layer's mixer,
    which has a window"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Layers:
    """Which mixer each layer gets. Later and more specific lines win: pattern, keep, overrides, select."""

    pattern: list[str] | None = None
    """mixer names, repeated to fill all layers; `sse*5` stands for five"""
    keep: list[int | str] = dc.field(default_factory=list)
    """layers left as softmax: indices, negative indices, ranges such as 3-5"""
    overrides: dict[int | str, str | FullHeads] = dc.field(default_factory=dict)
    """layer index or range to mixer name, or to the heads that stay softmax, e.g. {7: {full_heads: [2]}}"""
    select: Select | None = None
    """choose layers that stay softmax, e.g. {keep: 25%}; the others become what the lines above say, or sse+sliding"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class LearningRates:
    """Peak learning rates by group of parameters."""

    mixers: Rate
    """the attention of converted layers: the teacher's projections, and what conversion added"""
    new: Rate | None = None
    """what conversion added (router, decays, low-rank paths, scales), which starts from little; unset means mixers"""
    rest: Rate | None = None
    """everything else; required unless `train: mixers`, where nothing else is trained"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """Rotary embedding of the student from a stage on, a new base or yarn; stored in config.json."""

    rope_theta: Annotated[float, Range(1, 1e12, more=True)] | None = None
    """base of the frequencies; unset keeps the model's"""
    factor: Annotated[float, Range(1, 1e6)] | None = None
    """yarn, to this multiple of the positions that the model was trained for; unset keeps the model's own type"""

    def given(self) -> dict[str, float]:
        """The keys that are set, by their names in `rope_parameters`."""
        return {key: value for key, value in dc.asdict(self).items() if value is not None}


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One training stage."""

    name: str
    """stage name, unique in the recipe; also its folder name"""
    loss: Loss
    """layer_mse aligns each layer, kl distils the teacher's logits, ce trains on the text"""
    tokens: Tokens
    """training budget in tokens, e.g. 100M"""
    seq_len: Length
    """tokens per packed row, e.g. 4K"""
    lr: Rate | LearningRates
    """peak learning rate, one for all or by group"""
    train: Literal["mixers", "all", "lora"] = "all"
    """what is trained: converted layers only (always so for layer_mse), everything, or converted layers plus LoRA"""
    batch_tokens: Tokens = 65536
    """tokens per optimizer step, over all processes; a multiple of seq_len * micro_batch (unset: rounded up to one)"""
    micro_batch: Auto | Count = "auto"
    """rows per forward pass and process; auto: as many as the GPU's memory holds, by `plan`'s estimate"""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon for the matrices of decoder layers and adamw for the rest, at the same learning rates"""
    warmup: float = 0.05
    """share of the steps with a linearly rising learning rate"""
    min_lr: Share = 0.1
    """end of the cosine as a share of the peak"""
    weight_decay: NotNegative = 0.0
    """weight decay of matrices"""
    gradient_checkpointing: Auto | bool = "auto"
    """recompute activations in the backward pass; auto: where the GPU's memory does not hold them"""
    loss_mask: Literal["all", "assistant"] = "all"
    """kl and ce: train on every token, or on assistant turns of the chat template alone"""
    rope: Rope | None = None
    """ce only: rotary embedding from this stage on, for rows beyond the trained positions; null changes nothing"""
    context_parallel: Annotated[int, Range(1, 64)] = 1
    """processes that hold a row together, each with its part of the tokens, for rows that one GPU cannot hold; under
    FSDP2, at most one process per query head"""
    checkpoint_steps: Auto | Count = "auto"
    """optimizer steps between checkpoints; auto, and besides: one every two minutes, less often where that takes more
    than 5% of the time"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A source of training or evaluation text."""

    path: PathText | None = None
    """file, folder or hub dataset; unset for teacher samples"""
    kind: Literal["text", "chat", "teacher"] = "text"
    """plain text, chat messages, or text sampled from the teacher"""
    name: str | None = None
    """hub dataset configuration"""
    split: str = "train"
    """hub dataset split"""
    field: str = "text"
    """column that holds the text (jsonl, parquet, hub); chat sources read `messages`"""
    streaming: bool = False
    """hub datasets: read on the fly instead of downloading first"""
    weight: Positive = 1.0
    """share of rows drawn from this source"""
    rows: Count = 256
    """teacher sources: rows to sample"""
    length: Annotated[int, Range(2, 2**30)] | None = None
    """teacher sources: tokens of a sampled row; unset means the seq_len of whoever reads, sampled anew for each"""


FORM_WEIGHTS = {"facts": 4.0, "numbered": 1.0, "table": 1.0}
"""forms of planted rows, and how often each is drawn"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Needles:
    """Retrieval rows planted into the training text (forms: `sse_convert/data/recall_forms.py`)."""

    share: Share = 0.0
    """share of rows that carry needles"""
    forms: dict[str, NotNegative] = dc.field(default_factory=lambda: dict(FORM_WEIGHTS))
    """how often rows take each form: facts, numbered, table; others are not drawn"""
    keys: list[Count] = dc.field(default_factory=lambda: [1, 2, 4, 8])
    """numbers of needles in a row, drawn uniformly; fewer in rows too short for them"""
    kinds: list[Literal["number", "word", "code", "uuid"]] = dc.field(
        default_factory=lambda: ["number", "word", "code", "uuid"]
    )
    """kinds of needle values, drawn uniformly"""
    answers: Literal["teacher", "row"] = "teacher"
    """where kl stages take planted answers from: the teacher, or the row where the teacher does not know them"""
    early: Share = 0.0
    """share of the questions that are asked in the text, anywhere after their needle, instead of at the end"""
    words: PathText | None = None
    """JSON list of key words; unset uses the built-in list. Evaluation keys are held out of training"""

    @property
    def drawn_forms(self) -> list[str]:
        """Forms that are drawn at all."""
        return [form for form, weight in self.forms.items() if weight]


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """Text for training and for evaluation."""

    train: list[Source] = dc.field(default_factory=list)
    """training sources"""
    valid: list[Source] = dc.field(default_factory=list)
    """held-out sources, a row of each in turn; the first `eval.tokens` tokens are used"""
    needles: Needles = dc.field(default_factory=Needles)
    """planted retrieval rows"""
    seed: Seed = 0
    """of what is sampled and measured, and with `train.seed` of the order of training text"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Calibrate:
    """Set new tensors from teacher statistics before training."""

    enabled: bool = True
    """run the calibrate stage, which sets decays by how far the teacher's heads look back"""
    rows: Count = 8
    """calibration rows, from the training sources"""
    seq_len: Length = 512
    """tokens per calibration row; distances beyond it are not seen, and attention takes memory by its square"""
    output_scale: Literal["fit", "size", "none"] = "fit"
    """output scale per head: least squares to the teacher's head outputs, their size, or left alone; beside a window,
    to what the window misses"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class NeedleEval:
    """Needle retrieval test."""

    lengths: list[Length]
    """context lengths in tokens"""
    samples: Count = 100
    """samples per kind and length"""
    kinds: list[Literal["number", "word", "code"]] = dc.field(default_factory=lambda: ["number"])
    """kinds of needle values"""
    keys: list[Count] = dc.field(default_factory=lambda: [1])
    """needles in the context, one of which is asked for"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class LMEval:
    """Tasks of the lm-evaluation-harness (extra `eval`)."""

    tasks: list[str]
    """task or group names of the harness; also `paper` (the paper's set), `niah` (eight needle tasks), `arc`"""
    include_path: PathText | None = None
    """folder with task YAML files of your own, for example over local data"""
    num_fewshot: Annotated[int, Range(0, 10**6)] | None = None
    """examples before each question; unset means each task's own number"""
    limit: Count | None = None
    """documents per task at most, for trials"""
    batch_size: Count = 1
    """rows per forward pass"""
    chat_template: bool = False
    """put every question into the tokenizer's chat template"""
    gen_kwargs: dict[str, bool | int | float | str | list[str]] = dc.field(default_factory=dict)
    """settings of generation over those of the tasks, e.g. {do_sample: true, temperature: 1.0, top_p: 0.7}"""
    lengths: list[Length] = dc.field(default_factory=lambda: [4096])
    """context lengths of the harness's RULER tasks"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Eval:
    """What is measured, teacher beside student."""

    lengths: list[Annotated[int, Range(2, 2**30)]] = dc.field(default_factory=list)
    """window lengths for the held-out loss; empty uses the last stage's seq_len"""
    tokens: Annotated[int, Range(0, 10**15)] = 65536
    """held-out tokens per window length, for loss, bits per byte, KL and agreement with the teacher; 0 measures none"""
    needle: NeedleEval | None = None
    """needle retrieval, off when unset"""
    lm_eval: LMEval | None = None
    """tasks of the lm-evaluation-harness, off when unset"""
    throughput: list[Annotated[int, Range(2, 2**30)]] = dc.field(default_factory=list)
    """context lengths at which prefill and decode speed are measured"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """The result."""

    dir: NewFolder
    """output folder; stages live beside it in `<dir>.stages`"""
    dtype: Literal["keep", "float32", "bfloat16", "float16"] = "keep"
    """storage type of the weights; keep means the teacher's"""
    delta: bool = False
    """write only tensors that are new or changed; whoever loads the model fetches the teacher for the others"""
    license: str | None = None
    """licence identifier for the model card; unset takes the one on the card of a local teacher"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Train:
    """Settings all stages share."""

    mixed_precision: Literal["no", "bf16"] | None = None
    """autocast type; unset means bf16 on a GPU, no on a CPU. Master weights are always float32"""
    lora_rank: Annotated[int, Range(1, 65536)] = 16
    """of the adapters of stages with `train: lora`, which export merges; alpha is twice as much"""
    compile: Auto | bool = "auto"
    """torch.compile each decoder layer in kl and ce stages: a minute at first, then faster steps; auto: on GPUs, in
    stages long enough to pay for it, where no row is split"""
    cuda_graphs: Auto | bool = "auto"
    """in kl stages on one GPU, launch forward and backward as one CUDA graph; one more set of activations in memory.
    auto: for narrow models, where passes still have enough rows. Where true cannot be, the stage says why"""
    validate_every: Auto | Tokens | None = "auto"
    """tokens between looks at `data.valid` while training: loss and KL, always on the same rows; auto: about 20 in a
    stage, over 2% of its tokens in all; null: none"""
    seed: Seed = 0
    """of initialisation and of the order of training text"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A whole conversion."""

    recipe_version: Literal[1]
    """schema version"""
    model: PathText
    """hub id or local folder of the teacher"""
    revision: str | None = None
    """hub revision of the teacher"""
    layers: Layers
    """which mixer each layer gets"""
    mixers: dict[str, Mixer] = dc.field(default_factory=dict)
    """named mixers; the built-in ones exist under their names, `full` is the untouched layer"""
    calibrate: Calibrate = dc.field(default_factory=Calibrate)
    """initialisation from teacher statistics"""
    stages: list[Stage] = dc.field(default_factory=list)
    """training stages, in order"""
    data: Data = dc.field(default_factory=Data)
    """text"""
    train: Train = dc.field(default_factory=Train)
    """settings all stages share"""
    eval: Eval = dc.field(default_factory=Eval)
    """what is measured"""
    export: Export
    """the result"""

    @property
    def known_mixers(self) -> dict[str, Mixer]:
        """The built-in mixers by name, and its own beside them or in their place."""
        return {**BUILT_IN, **self.mixers}

    def to_dict(self) -> dict[str, Any]:
        """The resolved recipe as plain data."""
        mixers = {name: recipe_entry(mixer_to_dict(mixer)) for name, mixer in self.mixers.items()}
        return {**dc.asdict(self), "mixers": mixers}
