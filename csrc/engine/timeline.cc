#include "engine/timeline.h"

#include <cstdio>

namespace dadt {
namespace {

// Formats a time in microseconds. Floats are not used, since some scripts' locales print a comma as the
// decimal point.
std::string microseconds(Clock::duration time) {
  const long long ns = std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
  const long long size = ns < 0 ? -ns : ns;
  char text[32];
  std::snprintf(text, sizeof text, "%s%lld.%03lld", ns < 0 ? "-" : "", size / 1000, size % 1000);
  return text;
}

std::string json_string(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      result += '\\';
      result += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char code[8];
      std::snprintf(code, sizeof code, "\\u%04x", c);
      result += code;
    } else {
      result += c;
    }
  }
  return result + '"';
}

std::string arguments_of(const Operation& operation, const Result& result) {
  const bool gathers = operation.kind == Kind::kAllgather;
  std::string text =
      "\"bytes\":" + std::to_string(gathers ? operation.lane.size() : operation.layout.bytes());
  if (operation.layout.counts().size() > 1)
    text += ",\"tensors\":" + std::to_string(operation.layout.counts().size());
  if (result.error) text += ",\"error\":" + json_string(result.error->what());
  return text;
}

}  // namespace

Timeline::Timeline(int rank, Clock::time_point origin) : rank_(rank), origin_(origin) {}

void Timeline::operation(int track, const Operation& operation, const Marks& marks, const Result& result) {
  std::vector<Event> events;
  events.reserve(7);
  const Clock::time_point none{};
  overlapping(events, "queue", operation.name, marks.submitted, marks.started);
  events.push_back({"X", track, kind_name(operation.kind), operation.name, arguments_of(operation, result),
                    marks.started, marks.done - marks.started});
  auto from = marks.started;
  const auto stage = [&](const char* name, Clock::time_point to) {
    if (to <= from) return;
    events.push_back({"X", track, "stage", name, {}, from, to - from});
    from = to;
  };
  if (marks.packed != none) stage("pack", marks.packed);
  // The stage "wait" is the wait for the last rank to arrive, if the executor measures it.
  if (result.waited > 0) {
    stage("wait", marks.started + std::chrono::duration_cast<Clock::duration>(
                                      std::chrono::duration<double>(result.waited)));
  }
  if (marks.exchanged != none) {
    stage("exchange", marks.exchanged);
    stage("unpack", marks.done);
  } else {
    stage("exchange", marks.done);
  }
  add(std::move(events));
}

void Timeline::negotiated(const std::string& name, Clock::time_point submitted, Clock::time_point decided) {
  std::vector<Event> events;
  overlapping(events, "negotiate", name, submitted, decided);
  add(std::move(events));
}

void Timeline::step(int64_t number, Clock::time_point begin, Clock::time_point end,
                    const std::vector<Wait>& waits) {
  std::vector<Event> events;
  events.reserve(2 + 2 * waits.size());
  const std::string step = std::to_string(number);
  Clock::duration waited{};
  for (const Wait& wait : waits) waited += wait.end - wait.begin;
  events.push_back({"X", kTraining, "step", "step " + step,
                    "\"step\":" + step + ",\"compute_us\":" + microseconds(end - begin - waited) +
                        ",\"exposed_wait_us\":" + microseconds(waited),
                    begin, end - begin});
  auto from = begin;
  for (const Wait& wait : waits) {
    if (wait.begin > from)
      events.push_back({"X", kTraining, "compute", "compute", {}, from, wait.begin - from});
    events.push_back({"X", kTraining, "wait", "exposed wait",
                      "\"step\":" + step + ",\"for\":" + json_string(wait.name), wait.begin,
                      wait.end - wait.begin});
    from = wait.end;
  }
  if (end > from) events.push_back({"X", kTraining, "compute", "compute", {}, from, end - from});
  add(std::move(events));
}

std::string Timeline::drain(double timeout) {
  event_.wait([this] { return is_many_ || is_closed_; }, deadline_after(timeout));
  std::vector<Event> events;
  {
    const std::lock_guard lock(mutex_);
    events.swap(events_);
    is_many_ = false;
  }
  std::string text;
  for (const Event& event : events) write(text, event);
  return text;
}

void Timeline::close() {
  is_closed_ = true;
  event_.notify();
}

void Timeline::add(std::vector<Event> events) {
  const std::lock_guard lock(mutex_);
  if (events_.size() + events.size() > kMost) {
    dropped_ += events.size();
    return;
  }
  for (Event& event : events) events_.push_back(std::move(event));
  if (events_.size() < kMost / 4 || is_many_) return;
  is_many_ = true;
  event_.notify();
}

// Adds a span that may partly overlap other spans, which the trace format allows only for spans with an id.
void Timeline::overlapping(std::vector<Event>& events, const char* category, const std::string& name,
                           Clock::time_point begin, Clock::time_point end) {
  const uint64_t id = next_id_++;
  events.push_back({"b", kQueue, category, name, {}, begin, {}, id});
  events.push_back({"e", kQueue, category, name, {}, end, {}, id});
}

void Timeline::write(std::string& text, const Event& event) const {
  const std::string pid = std::to_string(rank_);
  text += "{\"ts\":" + microseconds(event.at - origin_);
  if (event.id == 0) text += ",\"dur\":" + microseconds(event.duration);
  text += std::string(",\"ph\":\"") + event.phase + "\",\"pid\":" + pid;
  text += ",\"tid\":" + std::to_string(event.track);
  text += std::string(",\"cat\":\"") + event.category + "\"";
  if (event.id != 0) text += ",\"id\":\"" + pid + "." + std::to_string(event.id) + "\"";
  text += ",\"name\":" + json_string(event.name);
  if (!event.arguments.empty()) text += ",\"args\":{" + event.arguments + "}";
  text += "},\n";
}

}  // namespace dadt
