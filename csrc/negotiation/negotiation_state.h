#pragma once

#include <deque>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "negotiation/link.h"
#include "negotiation/negotiation.h"

namespace dadt {

// The state that a Negotiation's thread works on, and the requests that others give it.
struct NegotiationState {
  struct Pending {
    std::shared_ptr<Ticket> ticket;
    Operation operation;
    Request request;
    // The thread only.
    bool sent = false;
    uint64_t sent_as = 0;  // 0: in full
  };
  struct Known {
    uint64_t id = 0;
    std::optional<Request> request;  // none: this rank had not submitted it
  };

  // Constant after construction.
  Engine* engine = nullptr;
  Engine* broadcaster = nullptr;  // may be the same
  int rank = 0;
  int world_size = 1;
  NegotiationOptions options;
  std::shared_ptr<const ToldTime> time;  // null: the system's clock counts, and there is a thread
  std::shared_ptr<Alarm> alarm = std::make_shared<Alarm>();

  // Any thread.
  std::atomic<int64_t> step{0};
  std::atomic<bool> has_error{false};
  std::atomic<bool> has_notices{false};
  std::atomic<bool> is_stopping{false};
  std::atomic<bool> is_finished{false};  // the thread is at its end
  std::atomic<bool> is_closing{false};   // somebody is in close, or was
  std::atomic<bool> is_closed{false};
  EventCount event;

  // Guarded by mutex. Entries of `pending` are erased by the thread only, so that it may use them without.
  std::mutex mutex;
  std::unordered_map<std::string, Pending> pending;
  std::vector<Pending*> fresh;  // not told to rank 0 yet
  Clock::time_point fresh_since;
  size_t fresh_bytes = 0;
  std::shared_ptr<Ticket> joining;
  bool join_is_fresh = false;
  std::optional<GivingUp> giving_up;
  std::deque<Notice> notices;
  std::vector<std::string> orders;
  bool closing = false;

  // The thread only.
  std::vector<std::unique_ptr<Link>> links;
  std::vector<bool> gone;                  // peers that have said goodbye
  std::optional<Coordinator> coordinator;  // on rank 0
  std::unordered_map<std::string, Known> known;
  std::unordered_map<uint64_t, std::string> names;
  std::deque<std::shared_ptr<Work>> running;  // the oldest first
  uint64_t followed = 0;                      // decisions
  uint64_t told_to_wait = 0;  // the decision, plus 1, after which rank 0 was told that this rank waits
  bool told_error = false;
  std::optional<Clock::time_point> farewell;

  // Whoever closes.
  std::thread thread;

  Clock::time_point now() const { return time ? time->now() : Clock::now(); }
  void run();
  bool turn(bool sleeps = false);
  bool look_round();
  void sleep();
  Clock::time_point wake_at();
  void receive(Link& link);
  void hear(Link& link, const Link::Message& message);
  void lose(Link& link);
  bool is_due(Clock::time_point at);
  void report();
  void decide();
  void follow(const Decision& decision);
  void start(const Batch& batch);
  std::vector<Pending> take(const std::vector<uint64_t>& ids);
  void drop(uint64_t id);
  void finish_join(int64_t last);
  void fail(GivingUp reason);
  void give_up();
  void abort_engines(const Error& error);
  void check_rank_0();
  std::string title_of_pending();
  void settle_all(const Error& error);
  void notify(std::vector<Notice> news);
  void give_orders();
  void take_leave();
  void send_to_all(const std::string& message);
  std::optional<Error> first_error();
};

}  // namespace dadt
