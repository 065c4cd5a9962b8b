#include "formats.h"
#include "halves.h"
#include "simd_neon.h"
#include "rounding.h"
#include "kernels.inl"

const hardpoint::Kernels hardpoint::neon_kernels = {"neon", quantize, quantized, floating, plain};
