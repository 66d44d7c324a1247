// Connections of named tensors that break while both ranks live, and are replaced.
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <random>

#include "negotiation/negotiation.h"
#include "ranks.h"
#include "tcp_pairs.h"

namespace dadt::negotiation_break_test {
namespace {

constexpr double kLong = 30;

// Ranks as threads, whose connections with rank 0 are replaced when they break.
class LastingNames {
 public:
  explicit LastingNames(int size) : executors_(connected(size, 4096)), sockets_(size, {-1}) {
    sockets_[0].resize(size, -1);
    for (int rank = 1; rank < size; ++rank) std::tie(sockets_[0][rank], sockets_[rank][0]) = pair();
    for (int rank = 0; rank < size; ++rank) {
      engines_.push_back(std::make_unique<Engine>(executors_[rank], rank, size, kLong));
      ranks_.push_back(std::make_unique<Negotiation>(*engines_[rank], *engines_[rank], rank, size,
                                                     sockets_[rank], NegotiationOptions{}, nullptr, 2));
    }
    for (int rank = 0; rank < size; ++rank) {
      threads_.emplace_back([this, rank] {
        while (const auto other = ranks_[rank]->await_break()) replace(std::max(rank, *other));
      });
    }
  }
  ~LastingNames() {
    spawn(size(), [&](int rank) {
      ranks_[rank]->close(kLong);
      engines_[rank]->close(kLong);
    });
    for (std::thread& thread : threads_) thread.join();
  }

  int size() const { return static_cast<int>(ranks_.size()); }
  Negotiation& operator[](int rank) { return *ranks_[rank]; }
  int replaced() const { return replaced_; }
  // Breaks the connection of a rank with rank 0, on either side.
  void cut(int rank, bool at_rank_0) {
    shutdown(at_rank_0 ? sockets_[0][rank] : sockets_[rank][0], SHUT_RDWR);
  }

 private:
  void replace(int rank) {
    const std::lock_guard lock(mutex_);
    const auto mine = ranks_[rank]->detach(0), theirs = ranks_[0]->detach(rank);
    if (!mine || !theirs) return;
    const auto [one, other] = pair();
    const bool is_here = ranks_[rank]->attach(0, one, *theirs);
    const bool is_there = ranks_[0]->attach(rank, other, *mine);
    EXPECT_EQ(is_here, is_there);
    close(one);
    close(other);
    replaced_ += is_here;
  }

  std::vector<std::shared_ptr<ShmExecutor>> executors_;
  std::vector<std::vector<int>> sockets_;
  std::vector<std::unique_ptr<Engine>> engines_;
  std::vector<std::unique_ptr<Negotiation>> ranks_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::atomic<int> replaced_{0};
};

Operation sum(const std::string& name, float& value) {
  Operation operation;
  operation.name = name;
  operation.reduction = Reduction::kSum;
  operation.layout = Layout(DType::kFloat32, {1});
  operation.inputs = {&value};
  operation.outputs = {&value};
  return operation;
}

TEST(NegotiationBreak, TensorsAreDecidedOverConnectionsThatAreReplaced) {
  constexpr int kSize = 3, kEnough = 20;
  LastingNames ranks(kSize);
  std::atomic<bool> is_over{false};
  std::thread cutter([&] {
    std::mt19937 random(5);
    while (!is_over) {
      ranks.cut(1 + static_cast<int>(random() % (kSize - 1)), random() % 2 == 0);
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 5000));
    }
  });
  spawn(kSize, [&](int rank) {
    float goes_on = 1;
    for (int round = 0; goes_on > 0; ++round) {
      std::vector<float> values(50);
      std::vector<std::shared_ptr<Ticket>> tickets;
      for (size_t i = 0; i < values.size(); ++i) {
        values[i] = static_cast<float>(i + static_cast<size_t>(rank));
        // Names that are new in each round, so that reports are long.
        std::string name = std::to_string(i) + "." + std::to_string(round) + std::string(2000, 'x');
        tickets.push_back(ranks[rank].submit(sum(name, values[i]), "sum"));
      }
      goes_on = rank == 0 && ranks.replaced() < kEnough ? 1 : 0;
      tickets.push_back(ranks[rank].submit(sum("goes on", goes_on), "sum"));
      for (const auto& ticket : tickets) {
        ASSERT_TRUE(ticket->wait(deadline_after(kLong))) << ticket->name().substr(0, 20);
        ASSERT_FALSE(ticket->result().error) << ticket->result().error->what();
      }
      for (size_t i = 0; i < values.size(); ++i) ASSERT_EQ(values[i], static_cast<float>(3 * i + 3));
    }
  });
  is_over = true;
  cutter.join();
  EXPECT_GE(ranks.replaced(), kEnough);
}

TEST(NegotiationBreak, ARankThatIsGivenUpIsNamed) {
  float value = 1;
  const auto executors = connected(2, 4096);
  const auto [here, there] = pair();
  Engine engine(executors[0], 0, 2, kLong);
  Negotiation one(engine, engine, 0, 2, {-1, here}, {}, nullptr, 2);
  std::thread giving([&] {
    const auto rank = one.await_break();
    ASSERT_EQ(rank, 1);
    EXPECT_TRUE(one.has_left(1));
    one.give_up(1);
  });
  const auto ticket = one.submit(sum("x", value), "sum");
  close(there);
  ASSERT_TRUE(ticket->wait(deadline_after(kLong)));
  giving.join();
  ASSERT_TRUE(ticket->result().error);
  EXPECT_EQ(ticket->result().error->code(), Code::kPeerLost);
  EXPECT_NE(std::string(ticket->result().error->what()).find("rank 1 is gone"), std::string::npos);
  EXPECT_FALSE(one.is_detached(1));
  EXPECT_FALSE(one.detach(1));
  one.close(0);
}

TEST(NegotiationBreak, AMessageWithAnotherNumberIsNone) {
  float value = 1;
  const auto executors = connected(2, 4096);
  const auto [here, there] = pair();
  Engine engine(executors[0], 0, 2, kLong);
  Negotiation one(engine, engine, 0, 2, {-1, here}, {}, nullptr, 2);
  const auto ticket = one.submit(sum("x", value), "sum");
  const uint32_t head[] = {1, 7};
  ASSERT_EQ(send(there, head, sizeof head, 0), static_cast<ssize_t>(sizeof head));
  ASSERT_TRUE(ticket->wait(deadline_after(kLong)));
  ASSERT_TRUE(ticket->result().error);
  EXPECT_STREQ(ticket->result().error->what(), "rank 1 sent what is no message of DADT's");
  one.close(0);
  close(there);
}

}  // namespace
}  // namespace dadt::negotiation_break_test
