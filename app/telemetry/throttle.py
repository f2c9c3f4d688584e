"""NVML's bits for why clocks are held down, in words."""

from .snapshot import NA, Number

_REASONS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}
# Not among them: idle (0x01), chosen application clocks (0x02) and display clocks (0x100) are no complaint.


def throttle_reasons(bits: Number) -> tuple[str, ...]:
    if bits is NA:
        return ()
    return tuple(text for bit, text in _REASONS.items() if int(bits) & bit)
