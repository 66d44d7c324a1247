#pragma once

#include <sys/types.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bell.h"
#include "error.h"
#include "layout.h"

namespace dadt {

enum class Kind : uint32_t { kAllreduce = 0, kBroadcast, kAllgather };
inline const char* kind_name(Kind kind) {
  constexpr const char* kNames[] = {"allreduce", "broadcast", "allgather"};
  return kNames[static_cast<int>(kind)];
}

// One operation as a rank submits it. The memory behind the pointers is the caller's.
struct Operation {
  Kind kind = Kind::kAllreduce;
  std::string name;
  Layout layout;
  std::vector<const void*> inputs;  // one per tensor; null: zeros. Empty in an allgather
  std::vector<void*> outputs;       // one per tensor; null: not delivered. A broadcast's tensors are in both
  double weight = 1.0;
  int root = 0;
  std::string lane;  // travels with an allreduce; an allgather's bytes

  // As in `allreduce "step 12 bucket 0"`.
  std::string title() const { return std::string(kind_name(kind)) + " \"" + name + "\""; }
};

// What an operation ended with.
struct Result {
  std::optional<Error> error;
  std::vector<std::string> lanes;  // by rank
  double weight_sum = 0;
  double seconds = 0;  // from the arrival of the last rank until done
  double waited = 0;   // for the last rank to arrive
};

// Handle to one operation. Any thread. It holds no lock, so that a forked child can destroy it.
class Work {
 public:
  explicit Work(Operation operation);
  ~Work();
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;

  const Operation& operation() const { return operation_; }
  bool done() const { return result_.load() != nullptr; }

  // Blocks until done or the deadline; true if done. May return early, false, on a signal.
  bool wait(Clock::time_point deadline);

  // After done. Does not throw the error that it may hold.
  const Result& result() const;

  // The first call decides and wakes the waiters; later ones change nothing and return false.
  bool finish(Result result);
  bool fail(const Error& error);

 private:
  // Constant after construction.
  const Operation operation_;
  const pid_t pid_;

  // Any thread.
  std::atomic<const Result*> result_{nullptr};
  Bell bell_;
};

}  // namespace dadt
