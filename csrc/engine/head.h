#pragma once

#include <string>
#include <vector>

#include "engine/work.h"

namespace dadt {

// What a rank tells the others of the operation that it is in, before its data. Its layout is the same on all
// ranks.
struct Head {
  uint32_t kind;
  uint32_t dtype;
  uint32_t reduction;
  int32_t root;
  uint32_t codec;
  uint32_t number;  // of the operations on this executor, modulo 2^32
  uint64_t total;   // elements
  uint64_t layout;  // hash of the tensors' sizes
  uint64_t lane;    // bytes
  double weight;
  uint64_t rate;       // bytes per second that its link can carry; 0: not known
  uint64_t name_hash;  // of all of the name
  char name[440];      // its beginning
};
static_assert(sizeof(Head) == 512);

// total: elements, of an exchange bytes. lane: bytes that follow.
Head head_of(const Operation& operation, size_t total, size_t lane);

// Whether a peer that is well may have sent it.
bool is_sound(const Head& head);

// Empty if the heads of two ranks are of one operation; else a sentence that names what both are in.
std::string difference(int rank, const Head& one, int peer, const Head& other);

// How the ranks count in an allreduce.
struct Shares {
  // weights: of each rank. Ranks of weight 0 are left out, as what they have may be no number, unless all
  // are.
  Shares(const Operation& operation, std::vector<double> weights);

  std::vector<int> ranks;       // that count, in order
  std::vector<double> weights;  // of those; empty: all count the same
  double divisor = 1;
  double sum = 0;
};

}  // namespace dadt
