#include "formats.h"
#include "halves.h"
#include "simd_avx2.h"
#include "rounding.h"
#include "kernels.inl"

const hardpoint::Kernels hardpoint::avx2_kernels = {"avx2", quantize, quantized, floating, plain};
