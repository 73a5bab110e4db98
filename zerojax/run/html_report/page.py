"""From a run's story to its page."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from zerojax.formatting import abbreviated, percent, size
from zerojax.run.html_report.charts import Chart, Series, draw, smoothed
from zerojax.run.html_report.story import Story


def render(story: Story, *, now: datetime | None = None) -> str:
    """The page as text.

    Whatever comes from the run is escaped; nothing in the page refers to anything outside it.

    Args:
        story: of the run.
        now: when the page is made; by default now.
    """
    environment = Environment(
        loader=PackageLoader("zerojax.run.html_report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    skipped = [line["step"] for line in story.steps if line.get("skipped")]
    return environment.get_template("page.html").render(
        story=story,
        style=_asset("page.css"),
        script=_asset("page.js"),
        facts=_facts(story),
        chart=_loss(story, skipped),
        charts=_charts(story, skipped),
        skipped=skipped,
        hops=_hops(story),
        sessions=[_session(number, one, story.written) for number, one in enumerate(story.sessions, 1)],
        environment=_environment(story),
        made=(now or datetime.now(UTC)).strftime("%Y-%m-%d %H:%M UTC"),
        json=lambda value: json.dumps(value, separators=(",", ":")),
    )


def _asset(name: str) -> Markup:
    """A file of ours, which needs no escaping."""
    return Markup(files("zerojax.run.html_report").joinpath(name).read_text(encoding="utf-8"))


def _facts(story: Story) -> list[tuple[str, str, str]]:
    """The numbers at the top: (what, how much, and a remark)."""
    facts: list[tuple[str, str, str]] = []
    if story.steps:
        planned = story.summary.get("steps") or story.config.get("train", {}).get("steps")
        done = f"{story.steps[-1]['step']:,}"
        facts.append(("steps", done, f"of {planned:,}" if isinstance(planned, int) else ""))
    if (loss := story.last("loss")) is not None:
        facts.append(("training loss", f"{loss:.4f}", "nats per token"))
    if (loss := story.last("validation_loss")) is not None:
        per_byte = story.summary.get("validation_loss_per_byte")
        remark = f"{per_byte:.4f} per byte" if story.status == "finished" and per_byte else "nats per token"
        facts.append(("validation loss", f"{loss:.4f}", remark))
    if (tokens := _typical(story, "tokens_per_second")) is not None:
        facts.append(("tokens per second", abbreviated(tokens), "median step"))
    if (mfu := _typical(story, "mfu")) is not None:
        facts.append(("MFU", percent(mfu), "median step"))
    if (seconds := _typical(story, "step_seconds")) is not None:
        facts.append(("step time", _duration(seconds), "median"))
    if (sent := story.last("internode_bytes")) is not None:
        facts.append(("sent per node", size(sent), "per step, to others"))
    memory = [x for x in story.series("memory_bytes")[1] if x is not None]
    if memory:
        facts.append(("memory", size(max(memory)), _memory_of(story)))
    return facts


def _memory_of(story: Story) -> str:
    of_host = story.summary.get("device_kind") == "cpu"
    return "most, of the first process" if of_host else "most, on its fullest device"


def _loss(story: Story, skipped: Sequence[int]) -> Chart | None:
    series = smoothed("training", *story.series("loss"))
    steps, values = story.series("validation_loss")
    if steps:
        series.append(Series("validation", steps, values, "dots"))
    return _draw(story, "Loss", "nats per token", series, marks=skipped, width=1160, height=320)


def _charts(story: Story, skipped: Sequence[int]) -> list[Chart]:
    rate, norm = story.series("learning_rate"), story.series("grad_norm")
    seconds = story.series("step_seconds") if story.series("mfu")[0] else ([], [])  # charts go in pairs
    found = [
        _draw(
            story,
            "Gradient norm",
            "before clipping, log scale",
            smoothed("norm", *norm),
            log=True,
            marks=skipped,
        ),
        _draw(story, "Learning rate", "", [Series("rate", *rate)], from_zero=True),
        _draw(
            story,
            "Throughput",
            "tokens per second, all devices",
            smoothed("tokens/s", *story.series("tokens_per_second"), rate=True),
            from_zero=True,
            capped=True,
        ),
        _draw(
            story,
            "Model FLOPs utilisation",
            "of the devices' bf16 peak",
            smoothed("MFU", *story.series("mfu"), rate=True),
            label=percent,
            from_zero=True,
            capped=True,
        ),
        _draw(
            story,
            "Step time",
            "",
            smoothed("step", *seconds),
            label=_duration,
            from_zero=True,
            capped=True,
        ),
        _draw(
            story,
            "Memory",
            "in use, " + _memory_of(story).removeprefix("most, "),
            [Series("memory", *story.series("memory_bytes"))],
            label=size,
            from_zero=True,
        ),
    ]
    return [chart for chart in found if chart is not None]


def _draw(story: Story, title: str, unit: str, series: Sequence[Series], **options: Any) -> Chart | None:
    last = story.steps[-1]["step"] if story.steps else 0
    restarts = [one["step"] for one in story.sessions if isinstance(one.get("step"), int) and one["step"] > 0]
    inside = [step for step in restarts if step <= last]
    return draw(title, unit, [s for s in series if s.steps], last_step=last, restarts=inside, **options)


def _hops(story: Story) -> dict[str, Any] | None:
    """Bytes of a step by phase and hop, with the length of each bar in percent."""
    sent = story.summary.get("communication")
    if not isinstance(sent, dict) or not sent.get("phases"):
        return None
    most = max(max(own["local_bytes"], own["node_bytes"]) for own in sent["phases"].values()) or 1.0
    rows = [
        {
            "phase": phase,
            "bars": [
                (hop, size(own[name]), 100 * own[name] / most)
                for hop, name in (("within the node", "local_bytes"), ("between nodes", "node_bytes"))
            ],
        }
        for phase, own in sent["phases"].items()
    ]
    total = {"local": size(sent["local_bytes"]), "node": size(sent["node_bytes"])}
    remark = "One node: nothing crosses the network."
    if sent["nodes"] > 1:
        remark = (
            f"Between nodes, per node and step: {size(sent['between_nodes'])}, which is "
            f"{sent['between_nodes'] / sent['model_bytes']:.3g} M (M: the model in bf16, "
            f"{size(sent['model_bytes'])}). ZeRO-3 in bf16 would send {size(sent['zero3_bytes'])}."
        )
    return {"rows": rows, "total": total, "remark": remark}


def _session(number: int, session: dict[str, Any], written: float | None) -> dict[str, str]:
    """A row of the table of starts; `written` is when a step was last heard of."""
    begun, ended = session.get("began"), session.get("ended")
    if session.get("status") == "running":
        ended = written
    lasted = "not known"
    if isinstance(begun, int | float) and isinstance(ended, int | float):
        lasted = "so far " * (session.get("status") == "running") + _duration(ended - begun)
    last = session.get("last_step")
    return {
        "number": str(number),
        "began": _when(begun),
        "steps": f"{session.get('step', 0)} to {'?' if last is None else last}",
        "lasted": lasted,
        "devices": str(session.get("devices", "")),
        "end": str(session.get("status") or "not known"),
        "notes": "; ".join(
            str(note) for note in [*session.get("notes", []), session.get("reason")] if note is not None
        ),
    }


def _environment(story: Story) -> list[tuple[str, str]]:
    names = {"devices": "devices", "device_kind": "kind", "processes": "processes", "host": "host"}
    names |= {"system": "system", "command": "command"}
    rows = [(text, str(story.summary[name])) for name, text in names.items() if name in story.summary]
    versions = story.summary.get("versions")
    if isinstance(versions, dict):
        rows += [(str(name), str(version)) for name, version in versions.items()]
    return rows


def _typical(story: Story, name: str) -> float | None:
    """The median of a value."""
    values = sorted(x for x in story.series(name)[1] if x is not None)
    return values[len(values) // 2] if values else None


def _when(seconds: Any) -> str:
    if not isinstance(seconds, int | float):
        return "not known"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    return str(timedelta(seconds=round(seconds)))
