#pragma once

#include "engine/executor.h"
#include "shm/chunk_slots.h"

namespace dadt {

// An executor that uses shared memory between the ranks of one host. An operation runs chunk by chunk through
// the slots of a ChunkSlots, so that data is reduced while it is in the cache: each rank copies its values of
// a chunk into its slot, waits until the peers have done so, and reduces the values of all ranks directly
// into its outputs.
class ShmExecutor final : public Executor {
 public:
  static constexpr size_t kSlotBytes = 128 * 1024;

  // slot_bytes: size of the largest chunk, the same on all ranks; a multiple of 64.
  ShmExecutor(int rank, int world_size, size_t slot_bytes = kSlotBytes);

  const char* name() const override { return "shm"; }
  std::string endpoint() override { return ring_.endpoint(); }
  void connect(const std::vector<std::string>& endpoints, double timeout) override;
  Result run(const Operation& operation, double timeout) override;
  void abort(const Error& error) override { ring_.abort(error); }
  void close() override { ring_.close(); }

 private:
  // The following fields are constant after construction.
  const int rank_;
  const int world_size_;
  const size_t slot_bytes_;

  ChunkSlots ring_;

  // Only the engine's thread uses the following fields.
  bool connected_ = false;
  uint32_t chunk_ = 0;  // number of chunks of all operations so far
};

}  // namespace dadt
