#include <algorithm>
#include <cstdint>
#include <functional>
#include <type_traits>

#include "ops.h"
#include "lanes_neon.h"
#include "ops.inl"
#include "attention.inl"
#include "draw.inl"

const hardpoint::FloatKernels hardpoint::neon_floats = {
    "neon", MOST_ROWS, rms_norm, layer_norm, rotate, activate, add, write, attend, join, draw, log_sum, finish};
