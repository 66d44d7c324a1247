// Messages over TCP, also while connections break and are replaced, and what comes of ranks that end, are
// gone, or say what no rank says.
#include "lasting_ranks.h"
#include "tcp/tcp_mailbox.h"

namespace dadt::tcp_mail_test {
namespace {

using Bytes = std::vector<uint8_t>;
using Handles = std::vector<std::shared_ptr<Transit>>;

std::vector<std::unique_ptr<TcpMailbox>> mailboxes(int world_size) {
  const auto sockets = meshes(world_size, 1);
  std::vector<std::unique_ptr<TcpMailbox>> boxes;
  for (int rank = 0; rank < world_size; ++rank) {
    boxes.push_back(std::make_unique<TcpMailbox>(std::make_shared<Links>(rank, sockets[rank])));
  }
  return boxes;
}

void expect_good(const std::shared_ptr<Transit>& transit) {
  ASSERT_TRUE(transit->wait(deadline_after(60))) << transit->title() << " is not done";
  EXPECT_FALSE(transit->error()) << transit->error()->what();
}

void expect_error(const std::shared_ptr<Transit>& transit, const std::string& text) {
  ASSERT_TRUE(transit->wait(deadline_after(60))) << transit->title() << " is not done";
  ASSERT_TRUE(transit->error());
  EXPECT_EQ(transit->error()->what(), text);
}

Bytes message(size_t length, size_t seed) {
  std::mt19937 random(static_cast<unsigned>(seed));
  Bytes bytes(length);
  for (size_t i = 0; i < length; i += 1 + random() % 64) bytes[i] = static_cast<uint8_t>(random());
  return bytes;
}

TEST(TcpMail, EveryRankToEveryRank) {
  const auto boxes = mailboxes(3);
  spawn(3, [&](int rank) {
    std::vector<Bytes> memory;
    Handles transits;
    memory.reserve(200);
    for (int64_t tag = 0; tag < 12; ++tag) {
      const size_t bytes = static_cast<size_t>(tag) * static_cast<size_t>(tag) * 3'001;
      for (int peer = 0; peer < 3; ++peer) {
        memory.emplace_back(bytes, static_cast<uint8_t>(rank + tag));
        transits.push_back(boxes[rank]->send(memory.back().data(), bytes, peer, tag));
      }
    }
    for (int64_t tag = 11; tag >= 0; --tag) {
      const size_t bytes = static_cast<size_t>(tag) * static_cast<size_t>(tag) * 3'001;
      for (int peer = 0; peer < 3; ++peer) {
        Bytes got(bytes);
        expect_good(boxes[rank]->receive(got.data(), bytes, peer, tag));
        EXPECT_EQ(got, Bytes(bytes, static_cast<uint8_t>(peer + tag)));
      }
    }
    for (const auto& transit : transits) expect_good(transit);
  });
}

TEST(TcpMail, WhatWasSentArrivesThoughItsSenderHasClosed) {
  const auto boxes = mailboxes(2);
  const Bytes sent(30'000, 7);
  for (int64_t tag = 0; tag < 5; ++tag) expect_good(boxes[0]->send(sent.data(), sent.size(), 1, tag));
  boxes[0]->close();
  for (int64_t tag = 0; tag < 5; ++tag) {
    Bytes got(sent.size());
    expect_good(boxes[1]->receive(got.data(), got.size(), 0, tag));
    EXPECT_EQ(got, sent);
  }
  uint8_t byte = 0;
  expect_error(boxes[1]->receive(&byte, 1, 0, 9),
               "rank 0 (127.0.0.1) has ended; waited for it in a receive with tag 9");
}

TEST(TcpMail, AnAbortFailsAllHereAndThere) {
  const auto boxes = mailboxes(2);
  uint8_t bytes[2];
  const auto here = boxes[0]->receive(bytes, 1, 1, 0);
  const auto there = boxes[1]->receive(bytes + 1, 1, 0, 0);
  boxes[0]->abort(Error(Code::kAborted, "stop"));
  expect_error(here, "stop");
  expect_error(there, "rank 0 gave up: stop");
}

// Connections that break -----------------------------------------------------------------------------------

// Messages of all lengths in all directions, several of a tag, of which the long ones are sent once the
// receiver has accepted them.
void round(LastingRanks& ranks, int rank, size_t number) {
  constexpr size_t kMessages = 24;
  const size_t world_size = static_cast<size_t>(ranks.world_size());
  const auto sent_by = [&](size_t from, size_t to, size_t i) {
    const size_t seed = ((number * kMessages + i) * world_size + from) * world_size + to;
    const size_t length = i % 6 == 0 ? 400'000 : i % 6 == 1 ? 0 : seed * 7919 % 40'000;
    return message(length, seed);
  };
  std::vector<Bytes> memory, got;
  Handles transits;
  for (size_t i = 0; i < kMessages; ++i) {
    for (int peer = 0; peer < ranks.world_size(); ++peer) {
      memory.push_back(sent_by(rank, peer, i));
      got.emplace_back(sent_by(peer, rank, i).size());
      const int64_t tag = static_cast<int64_t>(i % 2);
      transits.push_back(ranks.mail(rank).send(memory.back().data(), memory.back().size(), peer, tag));
      transits.push_back(ranks.mail(rank).receive(got.back().data(), got.back().size(), peer, tag));
    }
  }
  for (const auto& transit : transits) expect_good(transit);
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i], sent_by(i % world_size, rank, i / world_size)) << number << " " << i;
  }
}

class TcpMailBreak : public testing::TestWithParam<int> {};

TEST_P(TcpMailBreak, EveryMessageComesOnceAndInOrder) {
  constexpr int kEnough = 12;
  LastingRanks ranks(GetParam(), 1);
  Cutter cutter(ranks, kEnough);
  spawn(GetParam(), [&](int rank) {
    uint8_t goes_on = 1;
    for (size_t number = 0; goes_on != 0 && !testing::Test::HasFailure(); ++number) {
      round(ranks, rank, number);
      const uint8_t mine = ranks.replaced() < kEnough;
      if (rank == 0) {
        for (int peer = 0; peer < GetParam(); ++peer) expect_good(ranks.mail(0).send(&mine, 1, peer, 9));
      }
      expect_good(ranks.mail(rank).receive(&goes_on, 1, 0, 9));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, TcpMailBreak, testing::Values(2, 3));

void await_replaced(LastingRanks& ranks, int count) {
  const auto deadline = deadline_after(60);
  while (ranks.replaced() < count && Clock::now() < deadline) std::this_thread::yield();
  ASSERT_GE(ranks.replaced(), count);
}

TEST(TcpMailBreak, NothingNeedsToBeUnderWay) {
  LastingRanks ranks(2, 1);
  for (int turn = 1; turn <= 3; ++turn) {
    ranks.cut(turn % 2, 1 - turn % 2, Links::kMail);
    await_replaced(ranks, turn);
    spawn(2, [&](int rank) { round(ranks, rank, static_cast<size_t>(turn)); });
  }
  EXPECT_EQ(ranks.replaced(), 3);
}

TEST(TcpMailBreak, ALongMessageIsContinuedHoweverOften) {
  LastingRanks ranks(2, 1);
  Cutter cutter(ranks, 1000);
  int broken = 0;  // messages during which connections were replaced several times
  Bytes sent = message(24 << 20, 0), got(sent.size());
  for (size_t i = 0; i < 200 && broken < 3; ++i) {
    for (size_t at = i; at < sent.size(); at += 4099) ++sent[at];
    const int before = ranks.replaced();
    const auto receive = ranks.mail(1).receive(got.data(), got.size(), 0, 0);
    const auto send = ranks.mail(0).send(sent.data(), sent.size(), 1, 0);
    expect_good(receive);
    expect_good(send);
    if (ranks.replaced() > before + 1) ++broken;
    ASSERT_EQ(got, sent);
  }
  EXPECT_EQ(broken, 3);
}

TEST(TcpMailBreak, WhatNobodyHasAskedForYetIsKept) {
  LastingRanks ranks(2, 1);
  std::vector<Bytes> sent;
  Handles sends;
  for (size_t tag = 0; tag < 300; ++tag) {
    sent.push_back(message(20'000, tag));
    sends.push_back(ranks.mail(0).send(sent.back().data(), 20'000, 1, static_cast<int64_t>(tag)));
    if (tag % 100 == 50) {
      const int replaced = ranks.replaced();
      ranks.cut(static_cast<int>(tag) / 100 % 2, 1 - static_cast<int>(tag) / 100 % 2, Links::kMail);
      await_replaced(ranks, replaced + 1);
    }
  }
  for (size_t tag = 300; tag-- > 0;) {
    Bytes got(20'000);
    expect_good(ranks.mail(1).receive(got.data(), got.size(), 0, static_cast<int64_t>(tag)));
    EXPECT_EQ(got, sent[tag]);
  }
  for (const auto& each : sends) expect_good(each);
}

// Two ranks whose broken connections are replaced only by what a test does itself.
struct Broken {
  Broken() {
    for (int rank : {0, 1}) {
      links.push_back(std::make_shared<Links>(rank, sockets[rank], 30));
      mail.push_back(std::make_unique<TcpMailbox>(links.back()));
    }
  }
  ~Broken() {
    for (const auto& each : links) each->close();
  }

  void cut() { shutdown(sockets[1][0][Links::kMail], SHUT_RDWR); }

  const std::vector<std::vector<std::vector<int>>> sockets = meshes(2, 1);
  std::vector<std::shared_ptr<Links>> links;
  std::vector<std::unique_ptr<TcpMailbox>> mail;
};

TEST(TcpMailBreak, ARankThatCannotBeReachedIsNamedAfterItsLastMessage) {
  Broken ranks;
  Bytes last = message(9000, 1), got(9000);
  expect_good(ranks.mail[1]->send(last.data(), last.size(), 0, 1));
  ranks.cut();
  EXPECT_EQ(ranks.links[0]->await_break(), 1);
  const auto never = ranks.mail[0]->receive(got.data(), 1, 1, 2);
  EXPECT_FALSE(never->wait(deadline_after(0.05)));
  ranks.links[0]->give_up(1);
  expect_error(never, "rank 1 (127.0.0.1) is gone; waited for it in a receive with tag 2");
  expect_good(ranks.mail[0]->receive(got.data(), got.size(), 1, 1));
  EXPECT_EQ(got, last);
}

TEST(TcpMailBreak, ARankThatEndsIsNamed) {
  Broken ranks;
  uint8_t byte = 0;
  const auto never = ranks.mail[0]->receive(&byte, 1, 1, 2);
  std::thread waiting([&] { EXPECT_FALSE(ranks.links[0]->await_break()); });
  ranks.links[1]->close();
  ranks.mail[1]->close();  // was never used, and so says no goodbye of its own
  expect_error(never, "rank 1 (127.0.0.1) has ended; waited for it in a receive with tag 2");
  ranks.links[0]->close();
  waiting.join();
}

TEST(TcpMailBreak, AnAbortEndsTheWaitForAReplacement) {
  for (const bool tells : {false, true}) {
    Broken ranks;
    Bytes sent(1 << 20), got(1);
    const auto here = ranks.mail[0]->send(sent.data(), sent.size(), 1, 0);
    const auto there = ranks.mail[1]->receive(got.data(), 1, 0, 1);
    ranks.cut();
    EXPECT_EQ(ranks.links[0]->await_break(), 1);
    EXPECT_EQ(ranks.links[1]->await_break(), 0);
    EXPECT_FALSE(there->wait(deadline_after(0.05)));
    const Error stop(Code::kAborted, "stop");
    if (tells) ranks.links[0]->abort(stop);
    ranks.mail[0]->abort(stop);
    expect_error(here, "stop");
    if (!tells) continue;  // the other rank still waits as this one goes
    while (!ranks.links[1]->has_left(0)) std::this_thread::yield();
    expect_error(there, "rank 0 (127.0.0.1) is gone; waited for it in a receive with tag 1");
  }
}

// Rubbish --------------------------------------------------------------------------------------------------

// What fails the messages that wait: garbage behind some that is sound.
std::string rubbish(std::mt19937& random) {
  std::string bytes(48 + random() % 200, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random() % 3 == 0 ? random() : 0);
  return bytes;
}

class TcpMailRubbish : public testing::TestWithParam<int> {};

TEST_P(TcpMailRubbish, FailsWhatWaits) {
  std::mt19937 random(static_cast<unsigned>(GetParam()));
  const auto sockets = meshes(2, 1);
  TcpMailbox mine(std::make_shared<Links>(0, sockets[0]));
  Bytes memory(4000);
  const auto receive = mine.receive(memory.data(), memory.size(), 1, 3);
  const std::string bytes = rubbish(random);
  ASSERT_GT(send(sockets[1][0][Links::kMail], bytes.data(), bytes.size(), MSG_NOSIGNAL), 0);
  for (int socket : sockets[1][0]) close(socket);
  ASSERT_TRUE(receive->wait(deadline_after(60)));
  EXPECT_TRUE(receive->error());
}

// Someone who has proved that it is a rank breaks the connection and continues with rubbish.
TEST_P(TcpMailRubbish, FailsWhatWaitsOverAConnectionThatWasReplaced) {
  std::mt19937 random(static_cast<unsigned>(GetParam()));
  const auto sockets = meshes(2, 1);
  const auto links = std::make_shared<Links>(0, sockets[0], 30);
  TcpMailbox mine(links);
  Bytes memory(4000), sent(1000);
  const auto receive = mine.receive(memory.data(), memory.size(), 1, 3);
  mine.send(sent.data(), random() % 2 == 0 ? 0 : sent.size(), 1, 3);
  const std::string bytes = rubbish(random);
  const size_t first = random() % 48;
  ASSERT_GE(send(sockets[1][0][Links::kMail], bytes.data(), first, MSG_NOSIGNAL), 0);
  for (int socket : sockets[1][0]) close(socket);
  EXPECT_EQ(links->await_break(), 1);
  std::vector<int> theirs;
  bool is_attached = true;
  for (int turn = 0; is_attached && turn < 3; ++turn) {
    const auto received = links->detach(1);
    if (!received) break;  // what came before was rubbish enough
    EXPECT_LE(received->mail, bytes.size() * static_cast<size_t>(turn + 1));
    const uint64_t wrong = random() % 2 == 0 ? random() : random() % 2000;
    std::vector<int> ours;
    for (size_t i = 0; i < sockets[0][1].size(); ++i) {
      const auto [one, other] = pair();
      ours.push_back(one);
      theirs.push_back(other);
    }
    is_attached = links->attach(1, ours, {random() % 4 == 0 ? wrong : 0, random() % 2 == 0 ? wrong : 0});
    for (int socket : ours) close(socket);
    const int mail = theirs[theirs.size() - ours.size() + Links::kMail];
    ASSERT_GT(send(mail, bytes.data() + first, bytes.size() - first, MSG_NOSIGNAL), 0);
  }
  for (int socket : theirs) close(socket);
  links->detach(1);
  links->give_up(1);
  ASSERT_TRUE(receive->wait(deadline_after(60)));
  ASSERT_TRUE(receive->error());
  EXPECT_NE(receive->error()->code(), Code::kInternal) << receive->error()->what();
}
INSTANTIATE_TEST_SUITE_P(Seeds, TcpMailRubbish, testing::Range(0, 300));

}  // namespace
}  // namespace dadt::tcp_mail_test
