"""`report`: a run as one page."""

import dataclasses as dc
from collections.abc import Sequence
from pathlib import Path

from sse_convert.errors import UsageError
from sse_convert.files import check_writable
from sse_convert.pages.blocks import Section
from sse_convert.pages.collect import Evaluation, Run, collect
from sse_convert.pages.compare import labels, read_source
from sse_convert.pages.figures.drawing import styled
from sse_convert.pages.generate import make_samples
from sse_convert.pages.render import render, write_page
from sse_convert.pages.sections.layers import layers
from sse_convert.pages.sections.provenance import provenance
from sse_convert.pages.sections.quality import needles, quality
from sse_convert.pages.sections.recipe import recipe
from sse_convert.pages.sections.resources import resources
from sse_convert.pages.sections.routers import routers
from sse_convert.pages.sections.samples import samples
from sse_convert.pages.sections.summary import summary
from sse_convert.pages.sections.training import training
from sse_convert.report import FieldsReport, format_bytes

SUFFIX = ".report.html"


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class PageReport(FieldsReport):
    """A page that was written."""

    out: Path
    """the HTML file"""
    bytes: int
    """its size"""
    sections: tuple[str, ...]
    """titles, in order"""
    missing: dict[str, str]
    """title of a section without data -> the command that makes it"""

    def lines(self) -> list[str]:
        """The file, and what it lacks."""
        return [
            f"wrote {self.out} ({format_bytes(self.bytes)}); open it in a browser",
            *(f"{title} is empty; to fill it: {command}" for title, command in self.missing.items()),
        ]


def write_report(
    run: str | Path,
    *,
    out: Path | None = None,
    beside: Sequence[str | Path] = (),
    prompts: Sequence[str] = (),
    max_new_tokens: int = 64,
    device: str | None = None,
) -> PageReport:
    """Write the page of a run, finished or not, or of a converted checkpoint alone.

    Arguments and errors as of `api.report`.
    """
    found = collect(run)
    if found.model is not None and not found.model.converted:
        raise UsageError(
            f"{run} is a plain {found.model.model_type} checkpoint",
            expected="a run or a converted checkpoint",
            fix="convert it first, or use `sse-convert inspect`",
        )
    others = _others(beside)
    path = out or found.out.with_name(f"{found.out.name}{SUFFIX}")
    check_writable(path)
    if prompts:
        make_samples(found, prompts, max_new_tokens=max_new_tokens, device=device)
    found = collect(run)
    with styled(page=True):
        sections = _sections(found, others)
        page = render(found.name, "A conversion by sse-convert, and what came of it.", sections)
    return PageReport(
        out=path,
        bytes=write_page(path, page),
        sections=tuple(section.title for section in sections),
        missing={section.title: section.missing.command for section in sections if section.missing},
    )


def _sections(run: Run, others: Sequence[Evaluation]) -> list[Section]:
    return [
        summary(run),
        quality(run, others),
        needles(run),
        resources(run),
        layers(run),
        training(run),
        routers(run),
        samples(run),
        recipe(run),
        provenance(run),
    ]


def _others(sources: Sequence[str | Path]) -> tuple[Evaluation, ...]:
    """The evaluations of other models, named apart."""
    found = [read_source(source) for source in sources]
    for source, item in zip(sources, found, strict=True):
        if item.evaluation is None:
            raise UsageError(
                f"{source} was not evaluated", expected="a run or file with an evaluation", fix="leave it out"
            )
    names = labels([str(source) for source in sources])
    return tuple(dc.replace(i.evaluation, label=name) for i, name in zip(found, names, strict=True) if i.evaluation)
