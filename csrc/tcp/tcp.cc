#include "tcp/tcp.h"

#include <sched.h>

namespace dadt {

// Uses batch scheduling, so that the thread does not interrupt computing threads for every few packets, and
// handles more packets at once.
void TcpExecutor::settle_thread(int, int) {
  const sched_param none{};
  sched_setscheduler(0, SCHED_BATCH, &none);
}

Result TcpExecutor::run(const Operation& operation, double timeout) {
  if (links_->world_size() == 1) return run_alone(operation, 1);
  Collective collective(*links_, memory_, parts_, ways_, operation, operations_++, timeout);
  Result result = collective.run();
  links_->measure();
  return result;
}

}  // namespace dadt
