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

// How the floats of an allreduce are compressed.
struct Compression {
  Codec codec = Codec::kNone;
  // Residual: what compression has lost so far, one number per value of the layout; null to discard it.
  float* owed = nullptr;
  double keep = 1;  // factor by which the earlier residual is multiplied before it is added to the values
};

// One operation as a rank submits it. The caller owns the memory behind the pointers.
struct Operation {
  Kind kind = Kind::kAllreduce;
  Reduction reduction = Reduction::kMean;  // reduction of an allreduce
  std::string name{};
  // Sizes of the tensors; in an exchange, the bytes that are sent to each rank.
  Layout layout{};
  // Address of each input tensor; null stands for zeros. Empty in an allgather.
  std::vector<const void*> inputs{};
  // Address of each output tensor; null discards the output. In a broadcast, inputs and outputs are the same
  // tensors.
  std::vector<void*> outputs{};
  // In an exchange, the bytes that come from each rank. If both this and the outputs are empty, any number of
  // bytes is received into Result::received.
  Layout receives{};
  Compression compression{};  // compression of a mean or a sum
  void* flat =
      // Flat buffer in which all outputs lie, in order and without other data; null if there is none.
      nullptr;
  // Number of elements of the flat buffer. Elements after the last output are free for the executor's use.
  size_t room = 0;
  // Bytes that the data would have without any compression; negative: as many as its layout, since it was not
  // compressed before it was submitted.
  int64_t plain = -1;
  double weight = 1.0;
  // Number of ranks with weight 1, if all other ranks have weight 0; 0 if this rank does not know the weights
  // of others.
  int participants = 0;
  int root = 0;
  // Bytes that are sent along with an allreduce; in an allgather, the bytes to gather.
  std::string lane{};
  // Whether ranks may submit different operations by mistake, so that executors must compare them and fail on
  // all ranks.
  bool unsure = false;

  size_t plain_bytes() const { return plain < 0 ? layout.bytes() : static_cast<size_t>(plain); }

  // Returns the operation's name for messages, such as `allreduce "step 12 bucket 0"`.
  std::string title() const { return std::string(kind_name(kind)) + " \"" + name + "\""; }
};

// Memory owned by the core, for data whose size a rank cannot know beforehand.
struct Buffer {
  explicit Buffer(size_t count) : data(new uint8_t[count]), bytes(count) {}

  std::unique_ptr<uint8_t[]> data;
  size_t bytes;
};

// The outcome of an operation.
struct Result {
  std::optional<Error> error{};
  std::vector<std::string> lanes{};  // the lane (see Operation) of each rank
  // Data from each rank, in an exchange without outputs.
  std::vector<Buffer> received{};
  double weight_sum = 0;
  size_t sent = 0;     // bytes that this rank has sent in an allreduce
  size_t plain = 0;    // bytes that this rank would have sent uncompressed
  double seconds = 0;  // seconds from the arrival of the last rank to the operation's end
  double waited = 0;   // seconds spent waiting for the last rank to arrive
  // Time at which the first part of the data was packed; zero if unknown.
  Clock::time_point packed{};
};

// Handle to one operation, usable from any thread. It holds no lock, so that a forked child can destroy it.
class Work {
 public:
  explicit Work(Operation operation);
  ~Work();
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;

  const Operation& operation() const { return operation_; }
  Clock::time_point submitted() const { return submitted_; }
  bool done() const { return result_.load() != nullptr; }

  // Blocks until the operation is done or the deadline passes. Returns whether it is done. A signal may make
  // it return false early.
  bool wait(Clock::time_point deadline);

  // Returns the result; call it only once the operation is done. Does not throw the error that the result may
  // contain.
  const Result& result() const;

  // Sets the result. The first call takes effect, wakes the waiting threads and returns true; later calls
  // change nothing and return false.
  bool finish(Result result);
  bool fail(const Error& error);

 private:
  // The following fields are constant after construction.
  const Operation operation_;
  const pid_t pid_;
  const Clock::time_point submitted_ = Clock::now();

  // Any thread may use the following fields.
  std::atomic<const Result*> result_{nullptr};
  EventCount event_;
};

}  // namespace dadt
