"""What each way of growing changes at once, who uses the new partitions, and the loss after training."""

from pathlib import Path
from typing import Any

from sse_convert.files import replacing


def draw(report: dict[str, Any], png: Path) -> None:
    """Three panels with a row per way: KL at step 0; share of tokens in new partitions; loss beside the control.

    Args:
        report: what `growth` writes.
        png: file to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = list(report["ways"])
    figure, axes = plt.subplots(1, 3, figsize=(10, 0.9 + 0.32 * len(names)), sharey=True)
    axes[0].plot([report["ways"][name]["change"]["kl"] for name in names], range(len(names)), "o")
    axes[0].set(title="change at step 0", xlabel="KL, nats per token", xscale="log")
    for name in (name for name in names if name in report["trained"]):
        for run in report["trained"][name]["runs"]:
            shares = list(run["in_use"].values())
            axes[1].plot(shares, [names.index(name)] * len(shares), "o", color="C1", alpha=0.5)
    axes[1].set(title="in use after training", xlabel="share of tokens: layers, seeds", xlim=(-0.03, 1.03))
    for row in report["verdicts"]["ways"]:
        error = 0 if row["doubt"] is None else row["doubt"]
        axes[2].errorbar(-row["better_by"], names.index(row["way"]), xerr=error, fmt="o", capsize=2, color="C2")
    axes[2].axvline(0, color="grey", lw=0.8)
    axes[2].axvline(report["settings"]["margin"], color="grey", lw=0.8, ls=":")
    axes[2].set(title="loss above the control's", xlabel="nats per token, 95% interval, margin")
    axes[0].set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    own = report["environment"]
    figure.suptitle(f"{report['settings']['recipe']}; {own['device']}, commit {own['commit']}", fontsize=8)
    figure.tight_layout()
    with replacing(png) as temporary:
        figure.savefig(temporary, dpi=110, format="png")
    plt.close(figure)
