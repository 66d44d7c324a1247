// Messages between two ranks of a host.
#include "shm/mailbox.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <map>
#include <numeric>
#include <random>

#include "ranks.h"

namespace dadt::mailbox_test {
namespace {

constexpr size_t kPipe = 4096;  // messages of more than 512 bytes are long
constexpr int kAny = Transit::kAny;

using Bytes = std::vector<uint8_t>;
using Mailboxes = std::vector<std::unique_ptr<Mailbox>>;

Mailboxes opened(int world_size, size_t pipe_bytes = kPipe) {
  Mailboxes boxes;
  std::vector<std::string> endpoints;
  for (int rank = 0; rank < world_size; ++rank) {
    boxes.push_back(std::make_unique<Mailbox>(rank, world_size, pipe_bytes));
    endpoints.push_back(boxes.back()->endpoint());
  }
  spawn(world_size, [&](int rank) { boxes[rank]->connect(endpoints, 30); });
  return boxes;
}

Bytes message(size_t length, int seed) {
  Bytes bytes(length);
  std::iota(bytes.begin(), bytes.end(), static_cast<uint8_t>(seed * 31 + 1));
  return bytes;
}

const Transit& ended(const std::shared_ptr<Transit>& transit) {
  EXPECT_TRUE(transit->wait(deadline_after(30))) << transit->title() << " is not done";
  return *transit;
}

void expect_good(const std::shared_ptr<Transit>& transit) {
  const auto& error = ended(transit).error();
  EXPECT_FALSE(error) << error->what();
}

void expect_error(const std::shared_ptr<Transit>& transit, Code code, const std::string& text) {
  const auto& error = ended(transit).error();
  ASSERT_TRUE(error) << transit->title();
  EXPECT_EQ(error->code(), code);
  EXPECT_NE(std::string(error->what()).find(text), std::string::npos) << error->what();
}

TEST(Mailbox, EveryLengthInBothOrders) {
  const auto boxes = opened(2);
  for (size_t length : {0, 1, 511, 512, 513, 4096, 100'001}) {
    for (bool receive_first : {false, true}) {
      const Bytes sent = message(length, 1);
      Bytes got(length);
      std::shared_ptr<Transit> receive, send;
      if (receive_first) receive = boxes[1]->receive(got.data(), length, 0, 5);
      send = boxes[0]->send(sent.data(), length, 1, 5);
      if (!receive_first) receive = boxes[1]->receive(got.data(), length, 0, 5);
      expect_good(receive);
      expect_good(send);
      EXPECT_EQ(receive->source(), 0);
      EXPECT_EQ(got, sent) << length;
    }
  }
}

TEST(Mailbox, AShortSendIsDoneWithoutAReceive) {
  const auto boxes = opened(2);
  const Bytes sent = message(500, 3);
  expect_good(boxes[0]->send(sent.data(), sent.size(), 1, 0));
  Bytes got(500);
  expect_good(boxes[1]->receive(got.data(), got.size(), 0, 0));
  EXPECT_EQ(got, sent);
}

// A message that nobody asks for, be it short or long, is passed by others of another tag.
TEST(Mailbox, TagsDoNotBlockOneAnother) {
  const auto boxes = opened(2);
  std::vector<Bytes> sent, got;
  std::vector<std::shared_ptr<Transit>> sends, receives;
  for (int tag = 0; tag < 40; ++tag) sent.push_back(message(tag % 3 == 0 ? 20'000 : 400, tag));
  for (const Bytes& bytes : sent) got.emplace_back(bytes.size());
  for (int tag = 0; tag < 40; ++tag)
    sends.push_back(boxes[0]->send(sent[tag].data(), sent[tag].size(), 1, tag));
  for (int tag = 39; tag >= 0; --tag) {
    expect_good(boxes[1]->receive(got[tag].data(), got[tag].size(), 0, tag));
    EXPECT_EQ(got[tag], sent[tag]) << tag;
  }
  for (const auto& send : sends) expect_good(send);
}

TEST(Mailbox, OneTagKeepsItsOrder) {
  const auto boxes = opened(2);
  const int count = 300;
  std::vector<size_t> lengths;
  std::mt19937 random(3);
  for (int i = 0; i < count; ++i) lengths.push_back(random() % 3 == 0 ? random() % 9000 : random() % 500);
  spawn(2, [&](int rank) {
    std::vector<Bytes> data;
    std::vector<std::shared_ptr<Transit>> transits;
    for (int i = 0; i < count; ++i) {
      data.push_back(rank == 0 ? message(lengths[i], i) : Bytes(lengths[i]));
      transits.push_back(rank == 0 ? boxes[0]->send(data[i].data(), lengths[i], 1, 7)
                                   : boxes[1]->receive(data[i].data(), lengths[i], 0, 7));
    }
    for (const auto& transit : transits) expect_good(transit);
    for (int i = 0; i < count; ++i) EXPECT_EQ(data[i], message(lengths[i], i)) << i;
  });
}

// Every rank to every rank, itself included, from two threads each, with messages under way in both
// directions.
TEST(Mailbox, ManyUnderWayFromManyThreads) {
  for (int world_size : {1, 2, 3, 4}) {
    const auto boxes = opened(world_size);
    spawn(2 * world_size, [&](int thread) {
      Mailbox& box = *boxes[thread / 2];
      const int rank = thread / 2, tag = thread % 2;
      std::vector<Bytes> sent, got;
      std::vector<std::shared_ptr<Transit>> transits;
      for (int turn = 0; turn < 30; ++turn) {
        for (int peer = 0; peer < world_size; ++peer) {
          const size_t length = turn % 5 == 0 ? 10'000 : 100;
          sent.push_back(message(length, rank + turn));
          got.emplace_back(length);
          transits.push_back(box.receive(got.back().data(), length, peer, tag));
          transits.push_back(box.send(sent.back().data(), length, peer, tag));
        }
      }
      for (const auto& transit : transits) expect_good(transit);
      for (size_t i = 0; i < got.size(); ++i) {
        const int turn = static_cast<int>(i) / world_size, peer = static_cast<int>(i) % world_size;
        EXPECT_EQ(got[i], message(got[i].size(), peer + turn));
      }
    });
  }
}

TEST(Mailbox, FromAnybody) {
  const auto boxes = opened(3);
  std::map<int, Bytes> got;
  std::vector<Bytes> memory(4, Bytes(2000));
  std::vector<std::shared_ptr<Transit>> receives;
  for (Bytes& bytes : memory) receives.push_back(boxes[0]->receive(bytes.data(), bytes.size(), kAny, 1));
  const Bytes one = message(2000, 1), two = message(2000, 2);
  for (int turn = 0; turn < 2; ++turn) {
    expect_good(boxes[1]->send(one.data(), one.size(), 0, 1));
    expect_good(boxes[2]->send(two.data(), two.size(), 0, 1));
  }
  int from[3] = {};
  for (size_t i = 0; i < receives.size(); ++i) {
    expect_good(receives[i]);
    ++from[receives[i]->source()];
    EXPECT_EQ(memory[i], receives[i]->source() == 1 ? one : two);
  }
  EXPECT_EQ(from[1], 2);
  EXPECT_EQ(from[2], 2);
  // Another tag's is not taken, and what has come before is.
  expect_good(boxes[1]->send(one.data(), 100, 0, 9));
  expect_good(boxes[1]->send(two.data(), 100, 0, 8));
  const auto late = boxes[0]->receive(memory[0].data(), 100, kAny, 8);
  expect_good(late);
  EXPECT_EQ(late->source(), 1);
  EXPECT_EQ(Bytes(memory[0].begin(), memory[0].begin() + 100), Bytes(two.begin(), two.begin() + 100));
}

TEST(Mailbox, LengthsThatDifferAreNamed) {
  for (size_t length : {100, 5000}) {
    for (bool receive_first : {false, true}) {
      const auto boxes = opened(2);
      const Bytes sent = message(length, 1);
      Bytes got(length + 1);
      std::shared_ptr<Transit> receive, send;
      if (receive_first) receive = boxes[1]->receive(got.data(), got.size(), 0, 2);
      send = boxes[0]->send(sent.data(), length, 1, 2);
      if (!receive_first) receive = boxes[1]->receive(got.data(), got.size(), 0, 2);
      const std::string text = "rank 0 sends a message of " + std::to_string(length) +
                               " bytes with tag 2 to rank 1, which expects " + std::to_string(length + 1);
      expect_error(receive, Code::kMismatch, text);
      if (length == 5000) expect_error(send, Code::kMismatch, text);
      // The next is good again.
      const auto next = boxes[0]->send(sent.data(), length, 1, 2);
      expect_good(boxes[1]->receive(got.data(), length, 0, 2));
      expect_good(next);
    }
  }
}

TEST(Mailbox, AWaitThatIsTooLongNamesTheRank) {
  const auto boxes = opened(2);
  Bytes memory(5000);
  const auto send = boxes[0]->send(memory.data(), memory.size(), 1, 4);
  const auto receive = boxes[0]->receive(memory.data(), 10, 1, 4);
  const auto any = boxes[0]->receive(memory.data(), 10, kAny, 5);
  EXPECT_FALSE(send->wait(deadline_after(0.02)));
  EXPECT_EQ(send->late(0.5), "rank 1 did not take a message with tag 4 within 0.5 s");
  EXPECT_EQ(receive->late(2), "rank 1 did not send a message with tag 4 within 2 s");
  EXPECT_EQ(any->late(2), "no rank has sent a message with tag 5 within 2 s");
  EXPECT_FALSE(receive->done() || any->done());
}

TEST(Mailbox, ARankThatHasClosedIsNamedAfterItsLastMessage) {
  const auto boxes = opened(3);
  Bytes memory(5000), last = message(300, 1);
  expect_good(boxes[1]->send(last.data(), last.size(), 0, 1));
  const auto waiting = boxes[0]->receive(memory.data(), 10, 1, 2);
  const auto offered = boxes[0]->send(memory.data(), memory.size(), 1, 2);
  const auto any = boxes[0]->receive(memory.data(), 10, kAny, 2);
  boxes[1]->close();
  expect_error(waiting, Code::kPeerLost, "rank 1 (pid ");
  expect_error(waiting, Code::kPeerLost, ") has ended; waited for it in a receive with tag 2");
  expect_error(offered, Code::kPeerLost, ") has ended; waited for it in a send with tag 2");
  EXPECT_FALSE(any->done());  // rank 2 may still send
  Bytes got(300);
  expect_good(boxes[0]->receive(got.data(), got.size(), 1, 1));
  EXPECT_EQ(got, last);
  expect_error(boxes[0]->receive(got.data(), got.size(), 1, 1), Code::kPeerLost, "rank 1");
  boxes[2]->close();
  expect_error(any, Code::kPeerLost, "rank 2");
}

TEST(Mailbox, NobodyIsWaitedForWhoCannotCome) {
  const auto boxes = opened(2);
  Bytes memory(10);
  boxes[1]->close();
  for (int peer : {kAny, 1, kAny}) {  // also what is asked for when the loss is known
    expect_error(boxes[0]->receive(memory.data(), 10, peer, 3), Code::kPeerLost, "rank 1");
  }
}

TEST(Mailbox, CloseFailsWhatIsPendingAndLetsNothingIn) {
  const auto boxes = opened(2);
  Bytes memory(5000);
  const auto receive = boxes[0]->receive(memory.data(), 10, 1, 0);
  const auto send = boxes[0]->send(memory.data(), memory.size(), 1, 0);
  boxes[0]->close();
  expect_error(receive, Code::kAborted, "closed");
  expect_error(send, Code::kAborted, "closed");
  EXPECT_THROW(boxes[0]->send(memory.data(), 1, 1, 0), std::runtime_error);
  boxes[0]->close();
}

TEST(Mailbox, AnAbortReachesThePeers) {
  const auto boxes = opened(2);
  Bytes memory(10);
  const auto here = boxes[0]->receive(memory.data(), 10, 1, 0),
             there = boxes[1]->receive(memory.data(), 10, 0, 0);
  boxes[0]->abort(Error(Code::kAborted, "enough"));
  expect_error(here, Code::kAborted, "enough");
  expect_error(there, Code::kAborted, "rank 0 gave up: enough");
  expect_error(boxes[1]->send(memory.data(), 10, 0, 0), Code::kAborted, "rank 0 gave up");
}

TEST(Mailbox, AfterAnAbortNothingGoesWell) {
  const auto boxes = opened(3);
  Bytes memory(10);
  expect_good(boxes[2]->send(memory.data(), 10, 1, 0));
  boxes[0]->abort(Error(Code::kAborted, "enough"));
  expect_error(boxes[0]->send(memory.data(), 10, 1, 0), Code::kAborted, "enough");
  expect_error(boxes[1]->receive(memory.data(), 10, 2, 0), Code::kAborted, "rank 0 gave up: enough");
  expect_error(boxes[2]->send(memory.data(), 10, 1, 0), Code::kAborted, "rank 0 gave up: enough");
}

TEST(Mailbox, RefusesBadUse) {
  const auto boxes = opened(2);
  Bytes memory(10);
  EXPECT_THROW(boxes[0]->send(memory.data(), 10, 2, 0), std::invalid_argument);
  EXPECT_THROW(boxes[0]->send(memory.data(), 10, kAny, 0), std::invalid_argument);
  EXPECT_THROW(boxes[0]->receive(memory.data(), 10, 2, 0), std::invalid_argument);
  Mailbox alone(0, 1);
  EXPECT_THROW(alone.send(memory.data(), 10, 0, 0), std::runtime_error);
  EXPECT_THROW(Mailbox(2, 2), std::invalid_argument);
}

// Rank 1 in a process of its own: sends a message, and then does what `last` does.
class Peer {
 public:
  explicit Peer(const std::function<void(Mailbox&)>& last) {
    int to_child[2], to_parent[2];
    EXPECT_EQ(pipe(to_child), 0);
    EXPECT_EQ(pipe(to_parent), 0);
    pid_ = fork();
    if (pid_ == 0) {
      alarm(60);
      Mailbox box(1, 2, kPipe);
      meet(box, 1, to_parent[1], to_child[0]);
      const Bytes sent = message(9000, 1);
      const auto transit = box.send(sent.data(), sent.size(), 0, 1);
      if (!transit->wait(deadline_after(30)) || transit->error()) _exit(1);
      last(box);
      _exit(0);
    }
    mine = std::make_unique<Mailbox>(0, 2, kPipe);
    meet(*mine, 0, to_child[1], to_parent[0]);
    for (int fd : {to_child[0], to_child[1], to_parent[0], to_parent[1]}) ::close(fd);
  }
  ~Peer() { EXPECT_EQ(waitpid(pid_, nullptr, 0), pid_); }
  pid_t pid() const { return pid_; }

  std::unique_ptr<Mailbox> mine;

 private:
  static void meet(Mailbox& box, int rank, int out, int in) {
    std::vector<std::string> endpoints(2, box.endpoint());
    std::string& other = endpoints[1 - rank];
    const auto size = static_cast<ssize_t>(other.size());
    if (write(out, endpoints[rank].data(), other.size()) != size) _exit(1);
    if (read(in, other.data(), other.size()) != size) _exit(1);
    box.connect(endpoints, 30);
  }
  pid_t pid_;
};

TEST(Mailbox, APeerThatIsKilledIsNamed) {
  Peer peer([](Mailbox&) { pause(); });
  Bytes got(9000);
  expect_good(peer.mine->receive(got.data(), got.size(), 1, 1));
  EXPECT_EQ(got, message(9000, 1));
  const auto receive = peer.mine->receive(got.data(), 10, 1, 3),
             any = peer.mine->receive(got.data(), 10, kAny, 3);
  const auto send = peer.mine->send(got.data(), got.size(), 1, 3);
  kill(peer.pid(), SIGKILL);
  const std::string who = "rank 1 (pid " + std::to_string(peer.pid()) + ") is gone; waited for it in a ";
  expect_error(receive, Code::kPeerLost, who + "receive with tag 3");
  expect_error(any, Code::kPeerLost, who + "receive with tag 3");
  expect_error(send, Code::kPeerLost, who + "send with tag 3");
}

TEST(Mailbox, WhatAPeerSentBeforeItDiedArrives) {
  Peer peer([](Mailbox& box) {
    const Bytes sent = message(400, 2);
    box.send(sent.data(), sent.size(), 0, 2)->wait(deadline_after(30));
    _exit(0);
  });
  Bytes got(9000), last(400);
  expect_good(peer.mine->receive(got.data(), got.size(), 1, 1));
  const auto never = peer.mine->receive(got.data(), 10, 1, 3);
  expect_error(never, Code::kPeerLost, "is gone");
  expect_good(peer.mine->receive(last.data(), last.size(), 1, 2));
  EXPECT_EQ(last, message(400, 2));
}

TEST(Mailbox, IsInertInAForkedChild) {
  auto boxes = opened(2);
  Bytes memory(10);
  auto receive = boxes[0]->receive(memory.data(), 10, 1, 0);
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    int refused = 0;
    try {
      boxes[0]->send(memory.data(), 10, 1, 0);
    } catch (const std::runtime_error&) {
      ++refused;
    }
    try {
      receive->wait(deadline_after(30));
    } catch (const std::runtime_error&) {
      ++refused;
    }
    boxes[0]->abort(Error(Code::kAborted, "the child"));
    boxes[0]->close();
    receive.reset();
    boxes.clear();
    _exit(refused == 2 ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  const Bytes sent = message(10, 1);
  expect_good(boxes[1]->send(sent.data(), 10, 0, 0));
  expect_good(receive);
  EXPECT_EQ(memory, sent);
}

}  // namespace
}  // namespace dadt::mailbox_test
