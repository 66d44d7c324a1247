#pragma once

#include <vector>

#include "engine/work.h"

namespace dadt {

// Error feedback (arXiv:1901.09847): the residual, which compression has lost so far, is added to the values
// that a rank sends next. Where a value is not finite, or the rank's weight is 0, the earlier residual
// remains.

// Encodes blocks [begin, end) of an operation's inputs, one tensor after the other, in one pass over memory.
void compress(const Operation& operation, size_t begin, size_t end, void* wire);

// The encoded blocks of several ranks, for the same range of values.
struct Wires {
  std::vector<const uint8_t*> addresses;
  std::vector<double> weights;  // weight of each rank; empty if all weights are 1
  double divisor = 1;
};

// Computes outputs = (sum over wires, in their order, of weight * values) / divisor, in float32.
void decompress(const Operation& operation, size_t begin, size_t end, const Wires& wires);

// Computes the same weighted sum as decompress, divided by the divisor, and encodes it to `wire`. The blocks
// begin at value `first` of `total` values. What this encoding loses, times `share`, is added to this rank's
// residual `owed`, unless `owed` is null.
void combine(Codec codec, const Wires& wires, size_t first, size_t total, size_t blocks, void* wire,
             float* owed, double share);

}  // namespace dadt
