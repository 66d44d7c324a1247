#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "base/event_count.h"
#include "engine/work.h"

namespace dadt {

// The times at which an operation reached each stage; an unknown time is the zero of the clock.
struct Marks {
  Clock::time_point submitted{};
  Clock::time_point started{};
  Clock::time_point packed{};     // end of packing, if all data is packed before anything is sent
  Clock::time_point exchanged{};  // end of the transfer; after it, only the outputs are written
  Clock::time_point done{};
};

// A part of a step in which the training thread waited for an operation.
struct Wait {
  std::string name;
  Clock::time_point begin;
  Clock::time_point end;
};

// A record of one rank's work as events of Chrome's trace format. Any thread may add events; one thread
// drains them. Events that are not drained in time are counted but not stored, so that memory stays bounded.
class Timeline {
 public:
  static constexpr size_t kMost = size_t{1} << 17;  // most events stored between two calls of `drain`
  // Numbers of the first two tracks, which are rows of the display; the tracks of the engines follow them.
  static constexpr int kTraining = 1;
  static constexpr int kQueue = 2;

  // rank: used as the process id of the events. origin: the time that counts as 0 in the events.
  Timeline(int rank, Clock::time_point origin);

  // Records an operation. track: the row in which it is shown; operations in one row must not overlap.
  void operation(int track, const Operation& operation, const Marks& marks, const Result& result);
  void negotiated(const std::string& name, Clock::time_point submitted, Clock::time_point decided);
  // Records a step with its waits, which are in order of time and within the step.
  void step(int64_t number, Clock::time_point begin, Clock::time_point end, const std::vector<Wait>& waits);

  // Returns and removes the events recorded since the last call, each as a line of JSON that ends with a
  // comma. Blocks until there are many events, `timeout` seconds have passed, or the timeline is closed.
  std::string drain(double timeout);

  // Makes a call of `drain` that waits return, and every later call return at once.
  void close();

  uint64_t dropped() const { return dropped_; }

 private:
  struct Event {
    const char* phase;  // "X" is a span; "b" and "e" are the ends of a span that may overlap others
    int track;
    const char* category;
    std::string name;
    std::string arguments;  // JSON text of the arguments
    Clock::time_point at;
    Clock::duration duration{};
    uint64_t id = 0;
  };

  void add(std::vector<Event> events);
  void overlapping(std::vector<Event>& events, const char* category, const std::string& name,
                   Clock::time_point begin, Clock::time_point end);
  void write(std::string& text, const Event& event) const;

  // The following fields are constant after construction.
  const int rank_;
  const Clock::time_point origin_;

  // Any thread may use the following fields.
  EventCount event_;  // an event count, since a forked child could not destroy a condition variable
  std::atomic<uint64_t> next_id_{1};
  std::atomic<uint64_t> dropped_{0};
  std::atomic<bool> is_many_{false};
  std::atomic<bool> is_closed_{false};

  // This mutex guards the following field.
  std::mutex mutex_;
  std::vector<Event> events_;
};

}  // namespace dadt
