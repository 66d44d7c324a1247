#include "engine/executor.h"

#include <sched.h>

#include <cstring>
#include <sstream>

#include "kernels/kernels.h"

namespace dadt {

namespace {

void exchange_alone(const Operation& operation, int world_size, Result& result) {
  const auto& sent = operation.layout.counts();
  for (int rank = 0; rank < world_size; ++rank) {
    void* to = nullptr;
    size_t bytes = sent[rank];
    if (operation.outputs.empty()) {
      to = result.received.emplace_back(bytes).data.get();
    } else {
      to = operation.outputs[rank];
      const size_t room = operation.receives.counts()[rank];
      if (world_size == 1 && room != bytes) {
        throw Error(Code::kMismatch, operation.title() + ": " + std::to_string(bytes) +
                                         " bytes are sent and " + std::to_string(room) + " are expected");
      }
      bytes = std::min(bytes, room);
    }
    if (bytes > 0) std::memmove(to, operation.inputs[rank], bytes);
  }
}

}  // namespace

// Restricts the calling thread to this rank's share of the cores that the process may use. The ranks' threads
// wake at the same moment, and so briefly that the scheduler does not separate two threads that share a core;
// operations with a shared core were measured to take three times as long.
void Executor::settle_thread(int rank, int world_size) {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  const int cores = CPU_COUNT(&allowed);
  if (cores < world_size) return;
  cpu_set_t share;
  CPU_ZERO(&share);
  for (int core = 0, nth = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &allowed)) continue;
    if (nth * world_size / cores == rank) CPU_SET(core, &share);
    ++nth;
  }
  sched_setaffinity(0, sizeof share, &share);
}

Result run_alone(const Operation& operation, int world_size) {
  const auto start = Clock::now();
  Result result;
  if (operation.kind == Kind::kAllreduce) {
    const size_t item = item_size(operation.layout.dtype());
    // As in an allreduce with peers, the mean over one rank is its own value, and a sum counts a weight of 0
    // as 1.
    const bool weighted = world_size == 1 && operation.reduction == Reduction::kSum &&
                          operation.weight != 0 && operation.weight != 1;
    for (size_t i = 0; i < operation.outputs.size(); ++i) {
      const void* input = operation.inputs[i];
      void* output = operation.outputs[i];
      const size_t bytes = operation.layout.counts()[i] * item;
      if (output == nullptr || bytes == 0) continue;
      if (input == nullptr) {
        std::memset(output, 0, bytes);
      } else if (weighted) {
        const size_t count = operation.layout.counts()[i];
        kernels().scale[static_cast<int>(operation.layout.dtype())](output, input, operation.weight, count);
      } else if (output != input) {
        std::memcpy(output, input, bytes);
      }
    }
    result.weight_sum = operation.weight * world_size;
  }
  if (operation.kind == Kind::kExchange) exchange_alone(operation, world_size, result);
  if (operation.kind == Kind::kAllreduce || operation.kind == Kind::kAllgather)
    result.lanes.assign(world_size, operation.lane);
  result.seconds = seconds_between(start, Clock::now());
  return result;
}

Error lost_error(const std::string& who, bool lives, const std::string& title) {
  return Error(Code::kPeerLost, who + (lives ? " has ended" : " is gone") + "; waited for it in " + title);
}

Error late_error(const std::vector<int>& ranks, const std::string& title, double timeout) {
  std::ostringstream text;
  text << (ranks.size() == 1 ? "rank " : "ranks ");
  for (size_t i = 0; i < ranks.size(); ++i) text << (i == 0 ? "" : ", ") << ranks[i];
  text << " did not come to " << title << " within " << timeout << " s";
  return Error(Code::kTimeout, text.str());
}

void check_rank(int rank, int world_size) {
  if (rank < 0 || rank >= world_size) {
    throw std::invalid_argument("rank " + std::to_string(rank) + " of " + std::to_string(world_size) +
                                ": ranks run from 0 to world_size - 1");
  }
}

}  // namespace dadt
