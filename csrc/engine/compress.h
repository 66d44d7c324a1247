#pragma once

#include <vector>

#include "engine/work.h"

namespace dadt {

// Error feedback (arXiv:1901.09847): what a rank has not been able to say so far is added to what it says
// next. A rank owes nothing for values that are no numbers, nor in an operation in which its weight is 0.

// Blocks [begin, end) of an operation's inputs, one tensor after the other, in one pass over memory.
void compress(const Operation& operation, size_t begin, size_t end, void* wire);

// Parts of several ranks for the same blocks.
struct Wires {
  std::vector<const uint8_t*> addresses;
  std::vector<double> weights;  // empty: all 1
  double divisor = 1;
};

// outputs = (sum over wires, in their order, of weight * values) / divisor, in float32.
void decompress(const Operation& operation, size_t begin, size_t end, const Wires& wires);

// The same to a wire, of blocks that begin at value `first` of `total`. What that loses, times `share`, is
// added to what this rank owes (null: nothing).
void combine(Codec codec, const Wires& wires, size_t first, size_t total, size_t blocks, void* wire,
             float* owed, double share);

}  // namespace dadt
