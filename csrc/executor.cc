#include "executor.h"

#include <cstring>

namespace dadt {

Result run_alone(const Operation& operation, int world_size) {
  const auto start = Clock::now();
  Result result;
  if (operation.kind == Kind::kAllreduce) {
    const size_t item = item_size(operation.layout.dtype());
    for (size_t i = 0; i < operation.outputs.size(); ++i) {
      const void* input = operation.inputs[i];
      void* output = operation.outputs[i];
      const size_t bytes = operation.layout.counts()[i] * item;
      if (output == nullptr || output == input || bytes == 0) continue;
      if (input == nullptr) {
        std::memset(output, 0, bytes);
      } else {
        std::memcpy(output, input, bytes);
      }
    }
    result.weight_sum = operation.weight * world_size;
  }
  if (operation.kind != Kind::kBroadcast) result.lanes.assign(world_size, operation.lane);
  result.seconds = seconds_between(start, Clock::now());
  return result;
}

void check_rank(int rank, int world_size) {
  if (rank < 0 || rank >= world_size) {
    throw std::invalid_argument("rank " + std::to_string(rank) + " of " + std::to_string(world_size) +
                                ": ranks run from 0 to world_size - 1");
  }
}

}  // namespace dadt
