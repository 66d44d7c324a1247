// Connections over TCP that one group of ranks takes over from another one that has failed.
#include "tcp/kept_link.h"

#include <sys/socket.h>
#include <unistd.h>

#include <numeric>
#include <random>

#include "lasting_ranks.h"

namespace dadt::kept_link_test {
namespace {

void write_all(int socket, const std::string& bytes) {
  ASSERT_EQ(send(socket, bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
}

std::string read_all(int socket, size_t bytes) {
  std::string found(bytes, '\0');
  if (bytes == 0) return found;
  EXPECT_EQ(recv(socket, found.data(), bytes, MSG_WAITALL), static_cast<ssize_t>(bytes));
  return found;
}

// The sockets of two ranks: those for notices, messages and data.
struct Ends {
  explicit Ends(size_t sockets) {
    for (size_t i = 0; i < sockets; ++i) {
      const auto [one, other] = pair();
      ones.push_back({one});
      others.push_back({other});
    }
  }
  std::vector<UsedSocket> ones, others;
};

TEST(KeptLink, BytesOfTheOldGroupAreDroppedAtEveryPosition) {
  for (size_t written = 0; written <= 48; ++written) {
    for (size_t read = 0; read <= written; ++read) {
      Ends ends(3);
      write_all(ends.ones[1].descriptor, std::string(written, 'a'));
      write_all(ends.others[2].descriptor, std::string(written, 'b'));
      read_all(ends.others[1].descriptor, read);
      read_all(ends.ones[2].descriptor, written - read);
      ends.ones[1].written = ends.others[2].written = written;
      ends.others[1].read = read;
      ends.ones[2].read = written - read;
      KeptLink one(1, ends.ones), other(0, ends.others);
      one.enter(1);
      EXPECT_FALSE(one.clear(1, 0));
      other.enter(1);
      EXPECT_TRUE(other.clear(1, 5));
      EXPECT_TRUE(one.clear(1, 5));
      const std::vector<int> here = one.take(), there = other.take();
      for (size_t i = 0; i < 3; ++i) {
        write_all(here[i], "new");
        write_all(there[i], "too");
        EXPECT_EQ(read_all(there[i], 3), "new");
        EXPECT_EQ(read_all(here[i], 3), "too");
        close(here[i]);
        close(there[i]);
      }
    }
  }
}

TEST(KeptLink, NoticesOfTheOldGroupAreSkippedAtEveryPosition) {
  const std::string text = "a rank has ended";
  for (size_t read = 0; read < 8 + text.size(); ++read) {
    Ends ends(2);
    KeptLink one(1, ends.ones), other(0, ends.others);
    send_notice(ends.ones[0].descriptor, static_cast<uint32_t>(Code::kPeerLost), text);
    one.enter(7);
    EXPECT_TRUE(other.clear(7, 5));
    EXPECT_FALSE(one.clear(7, 0.01));
    other.enter(7);
    EXPECT_TRUE(one.clear(7, 5));
  }
}

TEST(KeptLink, WhatSeveralFailedGroupsLeftIsDropped) {
  Ends ends(2);
  write_all(ends.ones[1].descriptor, "one");
  ends.ones[1].written = 3;
  KeptLink other(0, ends.others);
  std::vector<int> here;
  {
    KeptLink one(1, ends.ones);
    one.enter(1);
    here = one.take();
  }
  // This rank goes on with generation 1, in which the other one does not take part.
  write_all(here[1], "group");
  KeptLink one(1, {{here[0]}, {here[1], 5, 0}});
  one.enter(2);
  one.enter(3);
  other.enter(3);
  EXPECT_TRUE(other.clear(3, 5));
  EXPECT_TRUE(one.clear(3, 5));
  write_all(here[1], "new");
  const std::vector<int> there = other.take();
  EXPECT_EQ(read_all(there[1], 3), "new");
  for (int socket : there) close(socket);
}

TEST(KeptLink, ARankInALaterGenerationIsNotAwaited) {
  Ends ends(2);
  KeptLink one(1, ends.ones), other(0, ends.others);
  one.enter(2);
  const Error error = caught([&] { other.clear(1, 5); });
  EXPECT_EQ(error.code(), Code::kPeerLost);
  other.enter(2);
  EXPECT_TRUE(other.clear(2, 5));
  EXPECT_TRUE(one.clear(2, 5));
}

// Whether all that reads from the sockets notices their end, and finds no byte.
bool has_ended(KeptLink& link) {
  bool all = true;
  for (int socket : link.take()) {
    char byte = 0;
    const ssize_t count = recv(socket, &byte, 1, MSG_DONTWAIT);
    all = all && (count == 0 || (count < 0 && errno != EAGAIN));
    close(socket);
  }
  return all;
}

TEST(KeptLink, WhatEndsOrLiesIsEnded) {
  const std::string few(3 * sizeof(uint64_t), '\1');
  const std::vector<std::function<void(Ends&)>> faults{
      [](Ends& ends) { shutdown(ends.ones[0].descriptor, SHUT_WR); },
      [](Ends& ends) { send_notice(ends.ones[0].descriptor, kBye, {}); },
      [](Ends& ends) { send_notice(ends.ones[0].descriptor, 77, "what?"); },
      [&](Ends& ends) { send_notice(ends.ones[0].descriptor, kEntry, few); },
      [](Ends& ends) { write_all(ends.ones[0].descriptor, std::string(64, '\xff')); },
      [](Ends& ends) {  // it has written less than was read
        ends.others[2].read = 5;
        KeptLink(1, {{dup(ends.ones[0].descriptor)}, {-1, 0, 0}, {-1, 4, 0}, {-1, 0, 0}}).enter(1);
      },
      [](Ends& ends) {  // it has written more than ever comes
        KeptLink(1, {{dup(ends.ones[0].descriptor)}, {-1, 0, 0}, {-1, 9, 0}, {-1, 0, 0}}).enter(1);
        shutdown(ends.ones[2].descriptor, SHUT_WR);
      }};
  for (size_t i = 0; i < faults.size(); ++i) {
    Ends ends(4);
    for (size_t each = 1; each < 4; ++each) write_all(ends.ones[each].descriptor, "rest");
    faults[i](ends);
    KeptLink other(0, ends.others);
    EXPECT_TRUE(other.clear(1, 5)) << i;
    EXPECT_TRUE(has_ended(other)) << i;
    for (const UsedSocket& each : ends.ones) close(each.descriptor);
  }
}

TEST(KeptLink, BytesThatDoNotComeAreAwaitedForSoLong) {
  Ends ends(2);
  ends.ones[1].written = 1;
  KeptLink one(1, ends.ones), other(0, ends.others);
  one.enter(1);
  EXPECT_FALSE(other.clear(1, 0.05));
  write_all(ends.ones[1].descriptor, "x");
  EXPECT_TRUE(other.clear(1, 5));
}

// Streams that stop in the midst of anything they send.
class KeptStream : public testing::TestWithParam<size_t> {};

TEST_P(KeptStream, TheNextStreamBeginsWhereTheLastOneStopped) {
  for (unsigned seed = 0; seed < 25; ++seed) {
    std::mt19937 random(seed);
    const auto below = [&](size_t limit) { return random() % limit; };
    Ends ends(1 + GetParam());
    // Small buffers, so that stripes are written in part.
    const int few = 4096;
    for (const UsedSocket& each : ends.ones)
      setsockopt(each.descriptor, SOL_SOCKET, SO_SNDBUF, &few, sizeof few);
    std::vector<int> here, there;
    for (size_t i = 0; i < ends.ones.size(); ++i) {
      here.push_back(ends.ones[i].descriptor);
      there.push_back(ends.others[i].descriptor);
    }
    for (uint64_t generation = 1; generation < 4; ++generation) {
      Stream from(1, {here.begin() + 1, here.end()}), to(0, {there.begin() + 1, there.end()});
      std::vector<uint8_t> sent(300'000), got(sent.size());
      for (uint8_t& each : sent) each = static_cast<uint8_t>(random());
      size_t begun = 0, received = 0;
      for (size_t steps = below(40); steps > 0; --steps) {
        const size_t most = below(2) == 0 ? 100 : 60'000;
        begun += from.send({{sent.data() + begun, std::min(sent.size() - begun, 1 + below(most))}});
        received += to.receive({{got.data() + received, std::min(got.size() - received, 1 + below(most))}});
        if (below(3) == 0) from.flush();
      }
      ASSERT_TRUE(std::equal(got.begin(), got.begin() + static_cast<ptrdiff_t>(received), sent.begin()));
      std::vector<UsedSocket> ones = from.release(), others = to.release();
      EXPECT_EQ(from.send({{sent.data(), 1}}), 0U);
      from.flush();
      ones.insert(ones.begin(), {here[0]});
      others.insert(others.begin(), {there[0]});
      KeptLink one(1, ones), other(0, others);
      one.enter(generation);
      other.enter(generation);
      while (!one.clear(generation, 0.01) || !other.clear(generation, 0.01)) {
      }
      here = one.take();
      there = other.take();
    }
    for (int socket : here) close(socket);
    for (int socket : there) close(socket);
  }
}

INSTANTIATE_TEST_SUITE_P(All, KeptStream, testing::Values(1, 3));

struct Case {
  int world_size;
  int streams;
};

class KeptRanks : public testing::TestWithParam<Case> {};

// Ranks lose one of them in the midst of operations and messages, again and again, until two are left.
TEST_P(KeptRanks, ThoseThatAreLeftGoOnInANewOrder) {
  const auto [world_size, streams] = GetParam();
  std::vector<std::vector<std::vector<int>>> sockets = meshes(world_size, streams);
  std::mt19937 random(static_cast<unsigned>(world_size));
  for (uint64_t generation = 1; sockets.size() > 1; ++generation) {
    const int size = static_cast<int>(sockets.size());
    const int lost = static_cast<int>(random() % static_cast<unsigned>(size));
    const auto pause = std::chrono::microseconds(random() % 20'000);
    std::vector<std::shared_ptr<TcpExecutor>> ranks;
    std::vector<std::unique_ptr<TcpMailbox>> mail;
    for (int rank = 0; rank < size; ++rank) {
      ranks.push_back(std::make_shared<TcpExecutor>(rank, sockets[rank], 30));
      mail.push_back(std::make_unique<TcpMailbox>(ranks[rank]->links()));
    }
    std::vector<std::string> messages(size, std::string(100'000, 'm')), received = messages;
    std::barrier begins(size + 1);
    std::thread telling([&] {
      begins.arrive_and_wait();
      std::this_thread::sleep_for(pause);
      const Error error(Code::kPeerLost, "a rank has ended");
      for (int rank = 0; rank < size; ++rank) {
        ranks[rank]->abort(error);
        mail[rank]->abort(error);
      }
    });
    spawn(size, [&](int rank) {
      std::vector<std::vector<float>> values(1, std::vector<float>(300'000));
      EXPECT_EQ(ranks[rank]->run(allgather("begins"), 30).lanes.size(), static_cast<size_t>(size));
      begins.arrive_and_wait();
      const Error error = caught([&] {
        while (true) {
          std::ranges::fill(values[0], static_cast<float>(rank + 1));
          mail[rank]->send(messages[rank].data(), messages[rank].size(), (rank + 1) % size, 0);
          mail[rank]->receive(received[rank].data(), received[rank].size(), Transit::kAny, 0);
          Operation operation = allreduce(DType::kFloat32, values, values);
          operation.reduction = Reduction::kSum;
          ranks[rank]->run(operation, 30);
          for (float value : values[0]) ASSERT_EQ(value, static_cast<float>(size * (size + 1) / 2));
        }
      });
      EXPECT_EQ(error.code(), Code::kPeerLost) << error.what();
    });
    telling.join();
    // The others are in the opposite order then.
    std::vector<std::vector<std::unique_ptr<KeptLink>>> links(size);
    for (int rank = 0; rank < size; ++rank) {
      ranks[rank]->close();
      mail[rank]->close();
      links[rank] = ranks[rank]->links()->release();
    }
    std::vector<int> left;
    for (int rank = size - 1; rank >= 0; --rank) {
      if (rank != lost) left.push_back(rank);
    }
    for (int rank : left) {
      for (int other : left) {
        if (other == rank) continue;
        ASSERT_NE(links[rank][other], nullptr);
        links[rank][other]->enter(generation);
      }
    }
    const auto before =
        std::exchange(sockets, std::vector(left.size(), std::vector<std::vector<int>>(left.size())));
    spawn(static_cast<int>(left.size()), [&](int place) {
      for (size_t other = 0; other < left.size(); ++other) {
        if (static_cast<size_t>(place) == other) continue;
        KeptLink& link = *links[left[place]][left[other]];
        EXPECT_TRUE(link.clear(generation, 30));
        sockets[place][other] = link.take();
        EXPECT_EQ(sockets[place][other], before[left[place]][left[other]]);
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(All, KeptRanks, testing::Values(Case{5, 1}, Case{4, 3}), [](const auto& each) {
  return std::to_string(each.param.world_size) + "Ranks" + std::to_string(each.param.streams) + "Streams";
});

TEST(KeptLink, AConnectionThatIsBrokenIsNotKept) {
  const auto sockets = meshes(3, 1);
  TcpExecutor one(0, sockets[0], 30), other(1, sockets[1], 30), third(2, sockets[2], 30);
  const Error error(Code::kPeerLost, "a rank has ended");
  one.links()->detach(1);
  for (TcpExecutor* each : {&one, &other, &third}) {
    each->abort(error);
    each->close();
  }
  EXPECT_EQ(one.links()->release()[1], nullptr);
  EXPECT_NE(third.links()->release()[1], nullptr);
  EXPECT_EQ(third.links()->release()[1], nullptr);
}

TEST(KeptLink, AGroupThatEndsWellKeepsNone) {
  const auto sockets = meshes(2, 1);
  TcpExecutor one(0, sockets[0], 30), other(1, sockets[1], 30);
  one.close();
  EXPECT_EQ(one.links()->release()[1], nullptr);
}

}  // namespace
}  // namespace dadt::kept_link_test
