#include <algorithm>
#include <cstdint>
#include <functional>
#include <type_traits>

#include "ops.h"
#include "lanes_avx2.h"
#include "ops.inl"
#include "attention.inl"
#include "draw.inl"

const hardpoint::FloatKernels hardpoint::avx2_floats = {
    "avx2", MOST_ROWS, rms_norm, layer_norm, rotate, activate, add, write, attend, join, draw, log_sum, finish};
