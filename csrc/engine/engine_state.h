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

// The state that an engine shares with its thread and with operations pulled from it.
struct EngineState {
  // The following fields are constant after construction.
  std::shared_ptr<Executor> executor;  // null if operations are pulled
  int rank = 0;
  int world_size = 1;
  double timeout = 0;

  // Any thread may use the following fields. `event` is notified after each change of the fields that the
  // mutex guards; the flags repeat their state for threads that sleep on `event`.
  EventCount event;
  std::atomic<bool> has_next{false};  // whether the first operation of the queue may begin
  std::atomic<bool> is_idle{true};    // whether no operation is queued or running
  std::atomic<bool> has_error{false};
  std::atomic<bool> is_stopping{false};
  std::atomic<bool> is_closed{false};
  std::atomic<Timeline*> timeline{nullptr};
  std::atomic<uint64_t> sent{0};
  std::atomic<uint64_t> plain{0};
  int track = 0;  // row in the timeline; written before `timeline` is set

  // This mutex guards the following fields.
  std::mutex mutex;
  std::shared_ptr<Timeline> recorded;  // owner of the object that `timeline` points to
  std::deque<std::shared_ptr<Work>> queue;
  std::set<const Work*> held;  // queued operations that may not begin before Engine::release
  std::shared_ptr<Work> current;
  std::optional<Error> error;
  bool closing = false;

  // Only the thread that closes the engine uses the following field.
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
