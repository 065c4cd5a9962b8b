// From GGUF blocks to the packed form of hardpoint.h, and back to numbers.

#pragma once

#include <cstdint>

#include "hardpoint.h"

namespace hardpoint {

// Columns of one block of a GGUF file, and the bytes it takes; 0 for a type that is not known.
int stored_columns(int32_t type);
int stored_bytes(int32_t type);

// -1 for a type that is not known or columns that are not whole blocks.
int64_t packed_group_bytes(int32_t type, int64_t columns);

// Pack the rows at `rows[0..count)`, count <= 16, into one group.
void pack_group(int32_t type, const uint8_t* const* rows, int count, int64_t columns, uint8_t* group);

// Row `row` of a matrix, packed or plain.
void read_row(const HpMatrix& matrix, int64_t columns, int64_t row, float* out);

}  // namespace hardpoint
