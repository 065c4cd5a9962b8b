#include "formats.h"
#include "halves.h"
#include "simd_generic.h"
#include "rounding.h"
#include "kernels.inl"

const hardpoint::Kernels hardpoint::generic_kernels = {"generic", quantize, quantized, floating, plain};
