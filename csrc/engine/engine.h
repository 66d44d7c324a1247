#pragma once

#include <memory>
#include <optional>
#include <string>

#include "engine/executor.h"
#include "engine/job.h"
#include "engine/timeline.h"
#include "engine/work.h"

namespace dadt {

struct EngineState;

// Runs operations one after the other on one executor. There is no static state, so a process may have
// several engines.
//
// 1. After construction only the engine's thread uses the executor, except for abort. The thread never takes
// the GIL.
// 2. Without an executor there is no thread, and the caller pulls the operations.
// 3. The first error is permanent: every pending and later Work fails with it. To recover, create a new
// engine.
// 4. In a forked child the engine is inert: submit and pull throw, and all other methods do nothing.
class Engine {
 public:
  // executor: must be connected; null if operations are pulled. timeout: seconds that an operation may wait
  // for a peer.
  Engine(std::shared_ptr<Executor> executor, int rank, int world_size, double timeout);
  // Aborts all pending operations and joins the thread.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Appends an operation to the queue. May be called from any thread; does not block. Throws
  // std::invalid_argument for an invalid operation, and std::runtime_error once the engine is closed. held:
  // the operation takes its place in the queue, but neither it nor later ones begin before `release`. Until
  // then its inputs may still be written.
  std::shared_ptr<Work> submit(Operation operation, bool held = false);

  // Lets an operation begin that was submitted as held; does nothing for any other. May be called from any
  // thread; does not block.
  void release(Work& work);

  // Throws the error that submit would throw for an invalid operation.
  void check(const Operation& operation) const;

  // Returns the next operation; null after `timeout` seconds, or if the engine is closed. The previous
  // operation must be finished.
  std::shared_ptr<Job> pull(double timeout);

  // Makes all pending and later operations fail with `error`. May be called from any thread; does not block.
  void abort(const Error& error);

  // Blocks until all pending operations are done or failed, then stops the thread. Idempotent. If that takes
  // longer than `timeout` seconds, aborts the remaining operations, closes the engine all the same, and
  // throws Error(kTimeout).
  void close(double timeout);

  bool closed() const;
  std::optional<Error> error() const;

  // Returns the bytes that this rank has sent in allreduces so far, and the bytes that it would have sent
  // uncompressed.
  std::pair<uint64_t, uint64_t> sent() const;

  // Starts to record the times of all operations in the timeline, on the row `track`. May be called once,
  // from any thread.
  void record(std::shared_ptr<Timeline> timeline, int track);
  // Returns the timeline in which operations are recorded; null if there is none.
  Timeline* timeline() const;

 private:
  bool inert() const;

  // The following fields are constant after construction.
  const pid_t pid_;
  std::shared_ptr<EngineState> state_;
};

}  // namespace dadt
