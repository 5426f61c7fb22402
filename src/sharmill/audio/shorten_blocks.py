"""The blocks of shorten: Rice codes of what linear prediction leaves. Compiled by numba where it is imported."""

from __future__ import annotations

from typing import Any, Final

import numba
import numpy as np

_DIFF3, _QUIT, _BLOCK_SIZE, _SHIFT, _LPC, _ZERO, _VERBATIM = range(3, 10)
_MAX_BLOCK: Final = 1 << 16
_LPC_BITS: Final = 5
_MAX_WIDTH: Final = 30

_compile: Any = numba.njit(nogil=True)


@_compile
def read_unsigned(bits: np.ndarray, position: int, width: int) -> tuple[int, int]:
    """Return a Rice code and the position of the bit behind it; a negative position where the bits end before."""
    end = 8 * len(bits)
    value = 0
    while position < end and not (bits[position >> 3] >> (7 - (position & 7))) & 1:
        value += 1
        position += 1
    position += 1
    if position + width > end or value > 1 << 24:
        return 0, -1
    for _ in range(width):
        value = (value << 1) | ((bits[position >> 3] >> (7 - (position & 7))) & 1)
        position += 1
    return value, position


@_compile
def read_signed(bits: np.ndarray, position: int, width: int) -> tuple[int, int]:
    """Return a Rice code whose last bit is the sign, as ``read_unsigned``."""
    value, position = read_unsigned(bits, position, width + 1)
    return (~(value >> 1) if value & 1 else value >> 1), position


@_compile
def read_number(bits: np.ndarray, position: int) -> tuple[int, int]:
    """Return a number that is stored behind its own width, as ``read_unsigned``."""
    width, position = read_unsigned(bits, position, 2)
    if position < 0 or width > _MAX_WIDTH:
        return 0, -1
    return read_unsigned(bits, position, width)


@_compile
def _divide(total: int, count: int) -> int:
    """Return a quotient rounded towards zero, as in C."""
    return total // count if total >= 0 else -(-total // count)


@_compile
def unpack_blocks(bits: np.ndarray, position: int, version: int, block_size: int, history: int, num_means: int,
                  mu_law: np.ndarray, samples: np.ndarray) -> int:  # fmt: skip
    """Decode blocks until the end mark, or until there are as many samples as wanted.

    Args:
        bits: bytes (n,).
        position: of the first bit.
        version: of the format, 1 or 2.
        block_size: samples of a block of one channel.
        history: samples that predictions look back on.
        num_means: blocks whose mean is the offset of the next one.
        mu_law: int16 (shifts, 256), the samples of stored values plus 128; (1, 1) of PCM.
        samples: int16 (channels, samples), to be filled.

    Returns:
        how many samples of each channel there are, or -1 where the blocks are damaged.
    """
    channels, wanted = samples.shape
    block = np.zeros((channels, history + _MAX_BLOCK), np.int64)
    means = np.zeros((channels, max(1, num_means)), np.int64)
    weights = np.zeros(history, np.int64)
    channel = done = shift = 0
    while done < wanted:
        command, position = read_unsigned(bits, position, 2)
        if position < 0 or command == _QUIT:
            return done
        if command == _BLOCK_SIZE:
            block_size, position = read_number(bits, position)
            if position < 0 or not 1 <= block_size <= _MAX_BLOCK:
                return -1
            continue
        if command == _SHIFT:
            shift, position = read_unsigned(bits, position, 2)
            if position < 0 or shift > 31 or (mu_law.size > 1 and shift >= len(mu_law)):
                return -1
            continue
        if command == _VERBATIM:
            count, position = read_unsigned(bits, position, 5)
            for _ in range(count):
                if position >= 0:
                    _, position = read_unsigned(bits, position, 8)
            if position < 0:
                return -1
            continue
        if command > _ZERO or (command > _DIFF3 and command not in (_LPC, _ZERO)):
            return -1
        offset = 0
        if num_means > 0:
            total = num_means // 2 if version > 1 else 0
            for number in range(num_means):
                total += means[channel, number]
            offset = _divide(total, num_means)
            if version > 1 and shift > 0:
                offset = (offset >> (shift - 1)) >> 1
        row = block[channel]
        position = _fill(bits, position, command, row, history, block_size, offset, version, weights)
        if position == -1:
            return done
        if position < 0:
            return -1
        if num_means > 0:
            total = block_size // 2 if version > 1 else 0
            for number in range(history, history + block_size):
                total += row[number]
            for number in range(num_means - 1):
                means[channel, number] = means[channel, number + 1]
            mean = _divide(total, block_size)
            means[channel, num_means - 1] = mean << shift if version > 1 else mean
        count = min(block_size, wanted - done)
        for number in range(count):
            value = row[history + number]
            if mu_law.size == 1:
                samples[channel, done + number] = min(max(value << shift, -32768), 32767)
            elif -128 <= value < 128:
                samples[channel, done + number] = mu_law[shift, value + 128]
            else:
                return -1
        for number in range(history):
            row[number] = row[block_size + number]
        channel += 1
        if channel == channels:
            channel = 0
            done += count
    return done


@_compile
def _fill(bits: np.ndarray, position: int, command: int, row: np.ndarray, history: int, block_size: int, offset: int,
          version: int, weights: np.ndarray) -> int:  # fmt: skip
    """Decode a block of a channel behind its history; returns the position behind it, -1 at the end, -2 if damaged."""
    begin, end = history, history + block_size
    if command == _ZERO:
        for place in range(begin, end):
            row[place] = 0
        return position
    width, position = read_unsigned(bits, position, 3)
    if position < 0:
        return -1
    if width > _MAX_WIDTH:
        return -2
    order = 0
    if command == _LPC:
        order, position = read_unsigned(bits, position, 2)
        if position < 0:
            return -1
        if order > history:
            return -2
        for number in range(order):
            weights[number], position = read_signed(bits, position, _LPC_BITS)
            if position < 0:
                return -1
        for place in range(begin - order, begin):
            row[place] -= offset
    for place in range(begin, end):
        rest, position = read_signed(bits, position, width)
        if position < 0:
            return -1
        if command == 0:
            row[place] = rest + offset
        elif command == 1:
            row[place] = rest + row[place - 1]
        elif command == 2:
            row[place] = rest + 2 * row[place - 1] - row[place - 2]
        elif command == _DIFF3:
            row[place] = rest + 3 * (row[place - 1] - row[place - 2]) + row[place - 3]
        else:
            total = 1 << _LPC_BITS if version > 1 else 0
            for number in range(order):
                total += weights[number] * row[place - 1 - number]
            row[place] = rest + (total >> _LPC_BITS)
    if command == _LPC:
        for place in range(begin, end):
            row[place] += offset
    return position
