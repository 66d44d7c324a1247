#pragma once

#include <string>
#include <vector>

#include "engine/work.h"

namespace dadt {

// The header that a rank sends to the other ranks before the data of an operation. Its memory layout is the
// same on all ranks.
struct Head {
  uint32_t kind;
  uint32_t dtype;
  uint32_t reduction;
  int32_t root;
  uint32_t codec;
  uint32_t number;  // number of the operation on this executor, modulo 2^32
  uint64_t total;   // number of elements
  uint64_t layout;  // hash of the tensors' sizes
  uint64_t lane;    // bytes of the operation's lane, which follows the header
  double weight;
  uint64_t rate;       // bytes per second that the rank's link can carry; 0 if unknown
  uint64_t cost;       // nanoseconds per MiB of the rank's last large operation; 0 if unknown
  uint64_t name_hash;  // hash of the operation's whole name
  char name[432];      // beginning of the operation's name
};
static_assert(sizeof(Head) == 512);

// Returns the header of an operation. total: number of elements, or of bytes in an exchange. lane: number of
// bytes that follow the header.
Head head_of(const Operation& operation, size_t total, size_t lane);

// Returns whether all fields are in their valid ranges, as in every header from a correct peer.
bool is_sound(const Head& head);

// Returns an empty text if the headers of two ranks describe the same operation, otherwise a sentence that
// names both operations.
std::string difference(int rank, const Head& one, int peer, const Head& other);

// The weights with which the ranks take part in an allreduce.
struct Shares {
  // weights: the weight of each rank. Ranks with weight 0 are left out, since their values may not be finite,
  // unless all ranks have weight 0.
  Shares(const Operation& operation, std::vector<double> weights);

  std::vector<int> ranks;       // the ranks that take part, in order
  std::vector<double> weights;  // factors for the values of these ranks; empty if none must be multiplied
  double divisor = 1;
  double sum = 0;
};

}  // namespace dadt
