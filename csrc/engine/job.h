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

// One operation pulled by a Python executor's thread. Finish or fail it once; one that is dropped fails.
class Job {
 public:
  Job(std::shared_ptr<EngineState> state, std::shared_ptr<Work> work);
  ~Job();
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  const Operation& operation() const { return work_->operation(); }

  // Write the inputs, times factor (none: their weight), to `destination`, and `source`, times scale, to the
  // outputs: one after the other, or, `spread`, as they lie in the flat buffer. Nothing is written where an
  // output is the source and the scale 1. Throw Error if the engine has failed since: the tensors' memory may
  // be gone.
  void pack(void* destination, std::optional<double> factor = {}, bool spread = false) const;
  void unpack(const void* source, double scale, bool spread = false) const;

  // Elements of the flat buffer up to the end of the last output; 0 without one.
  size_t spread_count() const;
  // Whether no input lies in the flat buffer.
  bool apart() const;

  // Write blocks [begin, end) of the inputs to `wire`, compressed. Throws Error if the engine has failed
  // since.
  void compress(size_t begin, size_t end, void* wire) const;
  // Write the sum of all blocks of `wires` to the outputs. Throws Error if the engine has failed since.
  void decompress(const Wires& wires) const;

  // Memory for what each rank sends, in an exchange that does not say where to; Result::received after
  // finish.
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

  // The thread that pulled it.
  std::vector<Buffer> received_;
  mutable Marks marks_;
};

}  // namespace dadt
