#include "formats.h"
#include "halves.h"
#include "simd_avx512.h"
#include "kernels.inl"

const hardpoint::Kernels hardpoint::avx512_kernels = {"avx512", quantize, quantized, floating, plain};
