#include "mail/transit.h"

#include <sstream>

namespace dadt {

std::string Transit::title() const {
  return (side == kSend ? "a send with tag " : "a receive with tag ") + std::to_string(tag);
}

bool Transit::wait(Clock::time_point deadline) {
  if (!done() && getpid() != pid_) throw std::runtime_error("this message belongs to the parent process");
  for (int i = 0; i < kSpins && !done(); ++i) spin_pause();
  return done() || event_.wait([this] { return done(); }, deadline);
}

std::string Transit::late(double seconds) const {
  std::ostringstream text;
  const std::string who = peer == kAny ? "no rank" : "rank " + std::to_string(peer);
  const char* what = side == kSend ? " did not take" : peer == kAny ? " has sent" : " did not send";
  text << who << what << " a message with tag " << tag << " within " << seconds << " s";
  return text.str();
}

}  // namespace dadt
