"""Tables and a picture of what `python -m benchmarks` measured."""

import json
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

SIZES = ("small", "medium", "large", "xl")


def write(results: Path) -> str:
    """Writes tables.md and growth.png into the folder `results` and returns the tables."""
    time_file = results / "update_time.json"
    documents = [json.loads(file.read_text()) for file in sorted((results / "tpu").glob("*.json"))]
    parts = [update_time(json.loads(time_file.read_text()))] if time_file.exists() else []
    if documents:
        parts += [compiled(documents), growth(documents)]
        draw(documents, results / "growth.png")
    tables = "\n\n".join(parts) + "\n"
    (results / "tables.md").write_text(tables)
    return tables


def update_time(document: dict) -> str:
    lines = [
        f"One update of {document['parameters'] / 1e6:.0f} M parameters in float32 on {document['device']}, medians over"
        f" {document['rounds']} rounds, gradient norm {document['gradient_norm']}:",
        "",
        "| optimizer | time over AdamW's | over Lion's |",
        "|---|---|---|",
    ]
    lines += [f"| {row['optimizer']} | {row['ratio_to_adamw']:.2f} | {row['ratio_to_lion']:.2f} |" for row in document["rows"]]
    return "\n".join(lines)


def compiled(documents: list[dict]) -> str:
    """Every optimizer where all were compiled, floors in parentheses."""
    lines = []
    places = {(d["size"], d["topology"]) for d in documents}
    for size, topology in sorted(places, key=lambda place: (SIZES.index(place[0]), place[1])):
        rows = [row for d in documents if (d["size"], d["topology"]) == (size, topology) for row in d["rows"]]
        if len(rows) < 3:
            continue
        rows.sort(key=lambda row: (row["floor"]["gflop"] > 0, "mars" in row["optimizer"], row["optimizer"]))
        lines += [
            *([""] if lines else []),
            f"GPT-2 {size} on {topology}, one chip:",
            "",
            "| optimizer | state, B/parameter | GFLOP | collectives, MiB | temporaries, MiB | memory traffic, MiB |",
            "|---|---|---|---|---|---|",
        ]
        for row in rows:
            kinds = ", ".join(f"{kind} {mib:,.1f}" for kind, mib in row["collectives_mib"].items() if mib >= 0.1)
            total, floor = sum(row["collectives_mib"].values()), row["floor"]
            cells = [
                row["optimizer"],
                f"{row['state_bytes_per_parameter']:.2f}",
                against(row["gflop"], floor["gflop"], 0),
                against(total, floor["collectives_mib"], 1) + (f": {kinds}" if kinds else ""),
                f"{row['temporaries_mib']:,.1f}",
                against(row["memory_traffic_mib"], floor["memory_traffic_mib"], 0),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def growth(documents: list[dict]) -> str:
    lines = [
        "mars-m as chips and model grow, one chip:",
        "",
        "| GPT-2 | v5e chips | GFLOP | collectives, MiB | temporaries, MiB | Levanter's Muon: GFLOP, MiB, temporaries |",
        "|---|---|---|---|---|---|",
    ]
    muons = {(d["size"], d["chips"]): row for d in documents for row in d["rows"] if row["optimizer"] == "muon"}
    for size, chips, row in points(documents, "mars-m"):
        muon = muons.get((size, chips))
        cells = [
            size,
            str(chips),
            against(row["gflop"], row["floor"]["gflop"], 0),
            against(sum(row["collectives_mib"].values()), row["floor"]["collectives_mib"], 1),
            f"{row['temporaries_mib']:,.1f}",
            three_of(muon) if muon else "not measured",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def three_of(row: dict) -> str:
    return f"{row['gflop']:,.0f}, {sum(row['collectives_mib'].values()):,.0f}, {row['temporaries_mib']:,.0f}"


def points(documents: list[dict], optimizer: str) -> list[tuple[str, int, dict]]:
    """Size, chips and row of every measurement of an optimizer, in this order."""
    found = [(d["size"], d["chips"], row) for d in documents for row in d["rows"] if row["optimizer"] == optimizer]
    return sorted(found, key=lambda point: (SIZES.index(point[0]), point[1]))


def against(value: float, floor: float, digits: int) -> str:
    """A figure, its floor and their ratio; the figure alone where the floor is nothing."""
    return f"{value:,.{digits}f} (≥ {floor:,.{digits}f}: {value / floor:.2f} ×)" if floor else f"{value:,.{digits}f}"


def draw(documents: list[dict], file: Path) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(12, 4), layout="constrained")
    quantities = {
        "GFLOP a chip": (lambda row: row["gflop"], lambda row: row["floor"]["gflop"]),
        "MiB of collectives a chip": (lambda row: sum(row["collectives_mib"].values()), lambda row: row["floor"]["collectives_mib"]),
        "MiB of temporaries a chip": (lambda row: row["temporaries_mib"], None),
    }
    for axis, (label, (value, floor)) in zip(axes, quantities.items(), strict=True):
        for optimizer, marker, line in (("mars-m", "o", "-"), ("muon", "x", ":")):
            for size, color in zip(SIZES, plt.get_cmap("viridis")([0.0, 0.3, 0.6, 0.85]), strict=True):
                mine = [(chips, row) for other, chips, row in points(documents, optimizer) if other == size]
                chips = [c for c, _ in mine]
                axis.plot(chips, [value(row) for _, row in mine], line, marker=marker, color=color)
                if floor and optimizer == "mars-m":
                    axis.plot(chips, [floor(row) for _, row in mine], "_", markersize=16, color=color)
        axis.set(xscale="log", yscale="log", xlabel="v5e chips", ylabel=label)
        axis.set_xticks([16, 64, 256], ["16", "64", "256"])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    for size, color in zip(SIZES, plt.get_cmap("viridis")([0.0, 0.3, 0.6, 0.85]), strict=True):
        axes[0].plot([], [], "o", color=color, label=f"mars-m, GPT-2 {size}")
    axes[0].plot([], [], "x:", color="gray", label="Levanter's Muon")
    axes[0].plot([], [], "_", color="gray", markersize=16, label="floor")
    figure.legend(loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(file, dpi=110)
    plt.close(figure)
