#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>

#include "engine/executor.h"
#include "engine/timeline.h"
#include "engine/work.h"

namespace dadt {

// What an engine, its thread and the operations that were pulled from it share.
struct EngineState {
  // Constant after construction.
  std::shared_ptr<Executor> executor;  // null: pull mode
  int rank = 0;
  int world_size = 1;
  double timeout = 0;

  // Any thread. Rung after each change of what mutex guards; the flags repeat it for those who sleep.
  EventCount event;
  std::atomic<bool> has_next{false};  // the queue's first may begin
  std::atomic<bool> is_idle{true};    // nothing is queued or runs
  std::atomic<bool> has_error{false};
  std::atomic<bool> is_stopping{false};
  std::atomic<bool> is_closed{false};
  std::atomic<Timeline*> timeline{nullptr};
  std::atomic<uint64_t> sent{0};
  std::atomic<uint64_t> plain{0};
  int track = 0;  // written before timeline

  // Guarded by mutex.
  std::mutex mutex;
  std::shared_ptr<Timeline> recorded;  // what `timeline` points to
  std::deque<std::shared_ptr<Work>> queue;
  std::set<const Work*> held;  // of the queue
  std::shared_ptr<Work> current;
  std::optional<Error> error;
  bool closing = false;

  // Whoever closes.
  std::thread thread;

  std::shared_ptr<Work> take();
  void settled(const Work& work);
  void fail(const Error& error);
  void count(const Result& result) {
    sent += result.sent;
    plain += result.plain;
  }
  void run();
  void run(Work& work);
  bool may_begin() const { return !queue.empty() && held.count(queue.front().get()) == 0; }
  void refresh() {
    has_next = may_begin();
    is_idle = queue.empty() && current == nullptr;
  }
};

}  // namespace dadt
