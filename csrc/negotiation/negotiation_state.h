#pragma once

#include <deque>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "negotiation/link.h"
#include "negotiation/negotiation.h"

namespace dadt {

// The state of a Negotiation's thread, and the requests that other threads pass to it.
struct NegotiationState {
  struct Pending {
    std::shared_ptr<Ticket> ticket;
    Operation operation;
    Request request;
    // Only the negotiation's thread uses the following fields.
    bool sent = false;
    uint64_t sent_as = 0;  // id by which the tensor was reported; 0 if it was reported in full
  };
  struct Known {
    uint64_t id = 0;
    std::optional<Request> request;  // this rank's request; none if it has not submitted the tensor
  };

  // The following fields are constant after construction.
  Engine* engine = nullptr;
  Engine* broadcaster = nullptr;  // engine for broadcasts; may be the same as `engine`
  int rank = 0;
  int world_size = 1;
  NegotiationOptions options;
  std::shared_ptr<const ToldTime> time;  // clock that a test sets; null outside of tests
  std::shared_ptr<Alarm> alarm = std::make_shared<Alarm>();

  // Any thread may use the following fields.
  std::atomic<int64_t> step{0};
  std::atomic<bool> has_error{false};
  std::atomic<bool> has_notices{false};
  std::atomic<bool> is_stopping{false};
  std::atomic<bool> is_finished{false};  // whether the thread has finished
  std::atomic<bool> is_closing{false};   // whether `close` was called
  std::atomic<bool> is_closed{false};
  EventCount event;

  // This mutex guards the following fields. Only the negotiation's thread erases entries of `pending`, so
  // this thread may use entries without the mutex.
  std::mutex mutex;
  std::unordered_map<std::string, Pending> pending;
  std::vector<Pending*> fresh;  // tensors that are not reported to rank 0 yet
  Clock::time_point fresh_since;
  size_t fresh_bytes = 0;
  std::shared_ptr<Ticket> joining;
  bool join_is_fresh = false;
  std::optional<GivingUp> giving_up;
  std::deque<Notice> notices;
  std::vector<std::string> orders;
  bool closing = false;

  // This mutex guards the following fields. It may not be locked while `mutex` is. The negotiation's thread
  // holds it except while it sleeps.
  std::mutex links_mutex;
  std::vector<std::unique_ptr<Link>> links;
  std::deque<int> broken;  // ranks whose connections have broken, for await_break
  std::atomic<bool> has_broken{false};

  // Only the negotiation's thread uses the following fields.
  std::vector<bool> gone;                  // for each rank, whether it has sent a goodbye
  std::optional<Coordinator> coordinator;  // set only on rank 0
  std::unordered_map<std::string, Known> known;
  std::unordered_map<uint64_t, std::string> names;
  std::deque<std::shared_ptr<Work>> running;  // operations in progress, the oldest first
  uint64_t followed = 0;                      // number of decisions that this rank has carried out
  // One more than the number of the decision after which rank 0 was informed that this rank waits.
  uint64_t told_to_wait = 0;
  bool told_error = false;
  std::optional<Clock::time_point> farewell;

  // Only the thread that closes the negotiation uses the following field.
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
  void lose_for_good(Link& link);
  void break_off(Link& link);
  Link* link_with(int peer);
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
