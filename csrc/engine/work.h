#pragma once

#include <sys/types.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/codec.h"
#include "base/error.h"
#include "base/event_count.h"
#include "base/layout.h"
#include "base/reduction.h"

namespace dadt {

enum class Kind : uint32_t { kAllreduce = 0, kBroadcast, kAllgather, kExchange };
constexpr uint64_t kKinds = 4;
inline const char* kind_name(Kind kind) {
  constexpr const char* kNames[] = {"allreduce", "broadcast", "allgather", "exchange"};
  return kNames[static_cast<int>(kind)];
}

// How an allreduce of floats travels.
struct Compression {
  Codec codec = Codec::kNone;
  float* owed = nullptr;  // one per value of the layout: what was lost so far; null: forget it
  double keep = 1;        // what is owed from before counts so much
};

// One operation as a rank submits it. The memory behind the pointers is the caller's.
struct Operation {
  Kind kind = Kind::kAllreduce;
  Reduction reduction = Reduction::kMean;  // of an allreduce
  std::string name{};
  Layout layout{};                    // of an exchange: the bytes that go to each rank
  std::vector<const void*> inputs{};  // one per tensor; null: zeros. Empty in an allgather
  std::vector<void*> outputs{};  // one per tensor; null: not delivered. A broadcast's tensors are in both
  Layout receives{};  // an exchange's outputs: the bytes that come from each rank. Both empty: as many as
                      // are sent, in Result::received
  Compression compression{};  // of a mean or a sum
  void* flat =
      nullptr;         // one buffer in which all outputs lie, in order, and nothing else; null: there is none
  size_t room = 0;     // its elements, of which those behind the last output are for whoever moves it
  int64_t plain = -1;  // bytes of what this stands for; below 0: of its layout
  double weight = 1.0;
  int participants = 0;  // ranks whose weight is 1 where the others' is 0; 0: not known before
  int root = 0;
  std::string lane{};   // travels with an allreduce; an allgather's bytes
  bool unsure = false;  // the ranks may differ in what they submit, and must then all be told

  size_t plain_bytes() const { return plain < 0 ? layout.bytes() : static_cast<size_t>(plain); }

  // As in `allreduce "step 12 bucket 0"`.
  std::string title() const { return std::string(kind_name(kind)) + " \"" + name + "\""; }
};

// Memory of the core's own, for what a rank cannot know the size of beforehand.
struct Buffer {
  explicit Buffer(size_t count) : data(new uint8_t[count]), bytes(count) {}

  std::unique_ptr<uint8_t[]> data;
  size_t bytes;
};

// The end of an operation.
struct Result {
  std::optional<Error> error{};
  std::vector<std::string> lanes{};  // by rank
  std::vector<Buffer> received{};    // by rank; of an exchange that did not say where to
  double weight_sum = 0;
  size_t sent = 0;             // bytes that this rank has sent, of an allreduce
  size_t plain = 0;            // that it would have sent uncompressed
  double seconds = 0;          // from the arrival of the last rank until done
  double waited = 0;           // for the last rank to arrive
  Clock::time_point packed{};  // the first part of what this rank sends; zero: not known
};

// Handle to one operation. Any thread. It holds no lock, so that a forked child can destroy it.
class Work {
 public:
  explicit Work(Operation operation);
  ~Work();
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;

  const Operation& operation() const { return operation_; }
  Clock::time_point submitted() const { return submitted_; }
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
  const Clock::time_point submitted_ = Clock::now();

  // Any thread.
  std::atomic<const Result*> result_{nullptr};
  EventCount event_;
};

}  // namespace dadt
