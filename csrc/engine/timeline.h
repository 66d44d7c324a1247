#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "base/event_count.h"
#include "engine/work.h"

namespace dadt {

// When an operation came where; the clock's zero: not known.
struct Marks {
  Clock::time_point submitted{};
  Clock::time_point started{};
  Clock::time_point packed{};     // of all that is packed before anything is sent
  Clock::time_point exchanged{};  // nothing is left but to write the outputs
  Clock::time_point done{};
};

// A part of a step in which the training thread stood still for an operation.
struct Wait {
  std::string name;
  Clock::time_point begin;
  Clock::time_point end;
};

// A record of one rank's work, as events of Chrome's trace format. Any thread adds, one drains. Events that
// are not drained in time are counted instead of kept: memory is bounded.
class Timeline {
 public:
  static constexpr size_t kMost = size_t{1} << 17;  // events between two drains
  // Tracks; those of the engines come after them.
  static constexpr int kTraining = 1;
  static constexpr int kQueue = 2;

  // rank: the events' process. origin: what is time 0 in them.
  Timeline(int rank, Clock::time_point origin);

  // track: the thread that the operation is shown on; those of one track must not overlap.
  void operation(int track, const Operation& operation, const Marks& marks, const Result& result);
  void negotiated(const std::string& name, Clock::time_point submitted, Clock::time_point decided);
  // Waits in their order, within the step.
  void step(int64_t number, Clock::time_point begin, Clock::time_point end, const std::vector<Wait>& waits);

  // Events since the last call, each a line that ends with a comma. Blocks until there are many, for
  // `timeout` seconds at most, or until closed.
  std::string drain(double timeout);

  // Makes a waiting drain return, and every later one at once.
  void close();

  uint64_t dropped() const { return dropped_; }

 private:
  struct Event {
    const char* phase;  // "X": a span; "b", "e": the ends of one that may overlap others
    int track;
    const char* category;
    std::string name;
    std::string arguments;  // JSON
    Clock::time_point at;
    Clock::duration duration{};
    uint64_t id = 0;
  };

  void add(std::vector<Event> events);
  void overlapping(std::vector<Event>& events, const char* category, const std::string& name,
                   Clock::time_point begin, Clock::time_point end);
  void write(std::string& text, const Event& event) const;

  // Constant after construction.
  const int rank_;
  const Clock::time_point origin_;

  // Any thread.
  EventCount event_;  // no condition variable: a forked child must be able to destroy it
  std::atomic<uint64_t> next_id_{1};
  std::atomic<uint64_t> dropped_{0};
  std::atomic<bool> is_many_{false};
  std::atomic<bool> is_closed_{false};

  // Guarded by mutex.
  std::mutex mutex_;
  std::vector<Event> events_;
};

}  // namespace dadt
