#include "shm/shm.h"

#include "shm/transfer.h"

namespace dadt {

namespace {
int checked(int rank, int world_size) {
  check_rank(rank, world_size);
  return rank;
}
}  // namespace

ShmExecutor::ShmExecutor(int rank, int world_size, size_t slot_bytes)
    : rank_(checked(rank, world_size)),
      world_size_(world_size),
      slot_bytes_(slot_bytes),
      ring_(rank, world_size, slot_bytes) {}

void ShmExecutor::connect(const std::vector<std::string>& endpoints, double timeout) {
  ring_.connect(endpoints, timeout);
  connected_ = true;
}

Result ShmExecutor::run(const Operation& operation, double timeout) {
  if (!connected_) throw std::runtime_error("the shm executor is not connected: call connect() first");
  if (world_size_ == 1) return run_alone(operation, 1);
  Transfer transfer(ring_, operation, rank_, world_size_, chunk_, slot_bytes_, timeout);
  Result result = transfer.run();
  chunk_ += transfer.chunks();
  return result;
}

}  // namespace dadt
