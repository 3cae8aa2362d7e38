"""How numbers are written, in terminals, on pages and in tables for papers. A value that rounds to zero has
no sign, and a negative one has a minus, not a hyphen."""

from __future__ import annotations


def share(value: float, digits: int = 1) -> str:
    """A share in percent without the unit: 0.1234 is '12.3'."""
    return f"{100 * value:z.{digits}f}".replace("-", "−")


def percent(value: float) -> str:
    """A share with its unit: 0.1234 is '12.3 %', -0.0001 is '0.0 %'."""
    return f"{share(value)} %"


def percent_and_spread(mean: float, spread: float | None) -> str:
    """'84.7 ± 2.9 %'; without a spread '84.7 %'."""
    return percent(mean) if spread is None else f"{share(mean)} ± {share(spread)} %"


def points(difference: float) -> str:
    """A difference of two shares, with its sign: 0.0123 is '+1.23 points'."""
    text = f"{100 * difference:+z.2f}".replace("-", "−")
    return f"{'0.00' if float(f'{100 * difference:.2f}') == 0 else text} points"


def amount(value: float) -> str:
    """Bytes in the units of engine.memory: 23,100,000 is '23.1 MB'."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def duration(seconds: float) -> str:
    """Seconds as '3.2 s', '4 min 10 s' or '2 h 5 min'."""
    if seconds < 120:
        return f"{max(seconds, 0.0):.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60} min"
