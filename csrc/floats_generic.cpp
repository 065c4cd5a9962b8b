#include <algorithm>
#include <cstdint>
#include <functional>
#include <type_traits>

#include "ops.h"
#include "lanes_generic.h"
#include "ops.inl"
#include "attention.inl"
#include "draw.inl"

const hardpoint::FloatKernels hardpoint::generic_floats = {
    "generic", MOST_ROWS, rms_norm, layer_norm, rotate, activate, add, write, attend, join, draw, log_sum, finish};
