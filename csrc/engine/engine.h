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

// One thread, one FIFO, one executor: no statics, and several engines in a process are fine.
//
// 1. Only the engine's thread uses the executor after construction, but for abort. It never takes the GIL.
// 2. Without an executor there is no thread: somebody pulls the operations.
// 3. The first error sticks. Every pending and later Work fails with it. Recover by making a new engine.
// 4. In a forked child the engine is inert: submit and pull throw, all else does nothing.
class Engine {
 public:
  // executor: connected; null for pull mode. timeout: seconds an operation may wait for a peer.
  Engine(std::shared_ptr<Executor> executor, int rank, int world_size, double timeout);
  // Aborts what is pending and joins the thread.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Any thread; does not block. Throws std::invalid_argument, and std::runtime_error once closed.
  // held: it has its place in the order, but neither it nor what comes after it begins before `release`.
  // Until then its inputs may still be written.
  std::shared_ptr<Work> submit(Operation operation, bool held = false);

  // Any thread; does not block. Nothing for a work that is not held.
  void release(Work& work);

  // The error that submit throws for an operation that makes no sense.
  void check(const Operation& operation) const;

  // The next operation; null after `timeout` seconds, or at close. The previous one must be finished.
  std::shared_ptr<Job> pull(double timeout);

  // Any thread; does not block.
  void abort(const Error& error);

  // Blocks until what is pending is done or failed, then stops the thread. Idempotent. Error(kTimeout) if
  // that took longer than `timeout` seconds; the rest was aborted, then, and the engine is closed all the
  // same.
  void close(double timeout);

  bool closed() const;
  std::optional<Error> error() const;

  // Bytes that this rank has sent in allreduces so far, and would have sent uncompressed.
  std::pair<uint64_t, uint64_t> sent() const;

  // Any thread: from now on, when which operation ran goes to the timeline, on that track. Once.
  void record(std::shared_ptr<Timeline> timeline, int track);
  // Null unless recorded.
  Timeline* timeline() const;

 private:
  bool inert() const;

  // Constant after construction.
  const pid_t pid_;
  std::shared_ptr<EngineState> state_;
};

}  // namespace dadt
