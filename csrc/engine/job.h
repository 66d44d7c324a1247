#pragma once

#include <sys/types.h>

#include <memory>
#include <optional>
#include <vector>

#include "engine/compress.h"
#include "engine/timeline.h"
#include "engine/work.h"

namespace dadt {

struct EngineState;

// One operation, pulled by the thread of a Python executor, which must finish or fail it once. If the Job is
// destroyed before that, the operation fails.
class Job {
 public:
  Job(std::shared_ptr<EngineState> state, std::shared_ptr<Work> work);
  ~Job();
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  const Operation& operation() const { return work_->operation(); }

  // pack writes the inputs times `factor` (by default the operation's weight) to `destination`; unpack writes
  // `source` times `scale` to the outputs. The tensors lie one after the other, or with `spread` at the same
  // offsets as in the flat buffer. unpack writes nothing to an output that is the source itself if the scale
  // is 1. Both throw Error if the operation has ended, since the tensors' memory may be freed.
  void pack(void* destination, std::optional<double> factor = {}, bool spread = false) const;
  void unpack(const void* source, double scale, bool spread = false) const;

  // Returns the number of elements of the flat buffer up to the end of the last output; 0 without a flat
  // buffer.
  size_t spread_count() const;
  // Returns whether all inputs lie outside the flat buffer of the outputs.
  bool apart() const;

  // Writes blocks [begin, end) of the inputs to `wire`, compressed. Throws Error if the operation has ended.
  void compress(size_t begin, size_t end, void* wire) const;
  // Writes the sum of all blocks of `wires` to the outputs. Throws Error if the operation has ended.
  void decompress(const Wires& wires) const;

  // Allocates memory for the bytes from each rank, for an exchange without outputs. After finish, this memory
  // is in Result::received.
  std::vector<void*> allocate(const std::vector<size_t>& bytes);

  void finish(Result result);
  void fail(const Error& error);

 private:
  void check() const;
  size_t place(size_t tensor) const;
  void record(const Result& result);

  const std::shared_ptr<EngineState> state_;
  const std::shared_ptr<Work> work_;
  const pid_t pid_;

  // Only the thread that pulled the operation uses the following fields.
  std::vector<Buffer> received_;
  mutable Marks marks_;
};

}  // namespace dadt
