#include "engine/null.h"

namespace dadt {

NullExecutor::NullExecutor(int rank, int world_size) : world_size_(world_size) {
  check_rank(rank, world_size);
}

void NullExecutor::connect(const std::vector<std::string>&, double) {}

Result NullExecutor::run(const Operation& operation, double) { return run_alone(operation, world_size_); }

}  // namespace dadt
