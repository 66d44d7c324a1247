#pragma once

#include "engine/executor.h"

namespace dadt {

// An executor that transfers nothing: every rank gets its own values back. Benchmarks use it to measure the
// limit that faster communication could reach.
class NullExecutor final : public Executor {
 public:
  NullExecutor(int rank, int world_size) : world_size_(world_size) { check_rank(rank, world_size); }

  const char* name() const override { return "null"; }
  Result run(const Operation& operation, double) override { return run_alone(operation, world_size_); }
  void abort(const Error&) override {}
  void close() override {}

 private:
  const int world_size_;  // constant after construction
};

}  // namespace dadt
