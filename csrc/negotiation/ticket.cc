#include "negotiation/ticket.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace dadt {
namespace {

constexpr int kWaitedFor = 1;
constexpr int kDecided = 2;

int make_eventfd() {
  const int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (fd < 0) throw Error(Code::kInternal, std::string("eventfd: ") + std::strerror(errno));
  return fd;
}

}  // namespace

Alarm::Alarm() : fd_(make_eventfd()) {}

Alarm::~Alarm() { close(fd_); }

void Alarm::notify() {
  // A failed write is ignored, since an eventfd whose counter is full wakes the thread as well.
  if (!rung_.exchange(true)) [[maybe_unused]]
    const int done = eventfd_write(fd_, 1);
}

void Alarm::reset() {
  eventfd_t count;
  [[maybe_unused]] const int done = eventfd_read(fd_, &count);
  rung_ = false;
}

Ticket::Ticket(std::string name, std::shared_ptr<Alarm> alarm)
    : name_(std::move(name)), alarm_(std::move(alarm)), pid_(getpid()) {}

Ticket::~Ticket() { delete end_.load(); }

bool Ticket::done() const {
  const End* end = end_.load();
  return end != nullptr && (end->work == nullptr || end->work->done());
}

bool Ticket::wait(Clock::time_point deadline) {
  if (!decided()) {
    if (getpid() != pid_) throw std::runtime_error("\"" + name_ + "\" belongs to the parent process");
    if (deadline > Clock::now()) tell_that_it_is_waited_for();
    if (!event_.wait([this] { return decided(); }, deadline)) return false;
  }
  const End& end = *end_.load();
  return end.work == nullptr || end.work->wait(deadline);
}

void Ticket::tell_that_it_is_waited_for() {
  if (counted_.fetch_or(kWaitedFor) != 0) return;
  ++alarm_->waiters;
  alarm_->notify();
}

const Ticket::End& Ticket::end() const {
  if (!done()) throw std::runtime_error("\"" + name_ + "\" is not done: call wait() first");
  return *end_.load();
}

const Result& Ticket::result() const { return end().work == nullptr ? end().result : end().work->result(); }

std::shared_ptr<Work> Ticket::work() const { return decided() ? end_.load()->work : nullptr; }

int Ticket::last_joined() const { return end().last_joined; }

bool Ticket::finish(std::unique_ptr<const End> end) {
  const End* expected = nullptr;
  if (!end_.compare_exchange_strong(expected, end.get())) return false;
  end.release();
  // The waiting thread may increment the count only after this decrement, so the count may be below 0 for a
  // moment.
  if (counted_.fetch_or(kDecided) & kWaitedFor) --alarm_->waiters;
  event_.notify();
  return true;
}

bool Ticket::run(std::shared_ptr<Work> work) {
  return finish(std::make_unique<const End>(End{.work = std::move(work)}));
}

bool Ticket::fail(const Error& error) {
  return finish(std::make_unique<const End>(End{.result = {.error = error}}));
}

bool Ticket::join(int last) { return finish(std::make_unique<const End>(End{.last_joined = last})); }

}  // namespace dadt
