// What peers send, changed at random: it is refused by an Error, or understood, and nothing else happens.
// Under the sanitizers this also holds for memory and arithmetic. DADT_FUZZ_INPUTS says how many inputs,
// DADT_FUZZ_SEED which.
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <random>

#include "mail/post.h"
#include "negotiation/coordinator.h"
#include "negotiation/message.h"
#include "ranks.h"

namespace dadt::fuzz_test {
namespace {

constexpr size_t kFew = 20'000;

size_t from_env(const char* name, size_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

class Fuzz : public testing::Test {
 protected:
  size_t below(size_t limit) { return std::uniform_int_distribution<size_t>(0, limit - 1)(random_); }
  bool one_in(size_t count) { return below(count) == 0; }
  // Mostly small; else near a power of two, where arithmetic goes wrong.
  uint64_t number() {
    if (!one_in(4)) return below(200);
    return (uint64_t{1} << below(64)) - 1 + below(3);
  }
  std::string text() { return std::string(below(12), static_cast<char>('a' + below(4))); }
  std::vector<uint64_t> numbers() {
    std::vector<uint64_t> values(below(4));
    for (auto& value : values) value = number();
    return values;
  }

  std::string changed(std::string bytes) {
    for (size_t times = below(5); times > 0; --times) {
      const size_t at = below(bytes.size() + 1);
      const size_t rest = bytes.size() - at;
      switch (below(6)) {
        case 0:
          if (rest > 0) bytes[at] = static_cast<char>(bytes[at] ^ (1 << below(8)));
          break;
        case 1:
          if (rest > 0) bytes[at] = "\x00\x01\x7f\x80\xff"[below(5)];
          break;
        case 2:
          bytes.insert(at, std::string(1 + below(10), one_in(2) ? '\xff' : '\x80'));
          break;
        case 3:
          bytes.erase(at, below(9));
          break;
        case 4:
          bytes.insert(at, bytes.substr(below(bytes.size() + 1), below(20)));
          break;
        default:
          bytes.resize(at);
      }
    }
    return bytes;
  }

  // Runs `once` on so many inputs, and tells how many were understood: too few, and nothing was shown.
  template <typename Once>
  void go(const char* what, Once&& once) {
    const size_t inputs = from_env("DADT_FUZZ_INPUTS", kFew);
    size_t understood = 0;
    for (size_t i = 0; i < inputs; ++i) understood += once();
    std::cout << what << ": " << inputs << " inputs, " << understood << " understood\n";
    EXPECT_GT(understood, inputs / 20);
    EXPECT_LT(understood, inputs);
  }

  std::mt19937_64 random_{from_env("DADT_FUZZ_SEED", 1)};
};

class FuzzMessages : public Fuzz {
 protected:
  Request request() {
    Request request;
    request.name = text();
    request.signature = text();
    if (one_in(2)) request.group = text();
    request.group_size = number();
    request.kind = static_cast<Kind>(below(kKinds));
    request.dtype = static_cast<DType>(below(kDTypes));
    request.reduction = static_cast<Reduction>(below(kReductions));
    request.counts = std::vector<size_t>(below(3), below(100));
    return request;
  }
  Report report() {
    Report report{number(), static_cast<int64_t>(number()), one_in(2), one_in(8), numbers(), {}};
    for (size_t left = below(4); left > 0; --left) report.requests.push_back(request());
    return report;
  }
  Decision decision() {
    Decision decision;
    decision.number = number();
    decision.evicted = numbers();
    decision.last_joined = static_cast<int64_t>(number());
    for (size_t left = below(3); left > 0; --left) {
      decision.admitted.push_back({number(), text()});
      decision.batches.push_back(
          {numbers(), numbers(), text(), DType::kFloat32, Reduction::kSum, {below(9)}});
      decision.failures.push_back({Code::kMismatch, text(), text(), {static_cast<int>(below(9))}});
    }
    return decision;
  }

  // What is understood says itself again as it was understood.
  template <typename Message, typename Decode>
  std::optional<Message> understood(const Message& sample, Decode&& decode) {
    const auto body = [](const Message& message) { return encode(message).substr(5); };
    std::optional<Message> message;
    try {
      message = decode(changed(body(sample)));
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::kComm);
      return std::nullopt;
    }
    EXPECT_EQ(body(decode(body(*message))), body(*message));
    return message;
  }
};

TEST_F(FuzzMessages, Reports) {
  std::optional<Coordinator> coordinator;
  auto now = Clock::now();
  go("reports to the coordinator", [&] {
    if (!coordinator || one_in(200)) coordinator.emplace(3, NegotiationOptions{});
    const auto told = understood(report(), decode_report);
    if (!told) return false;
    now += std::chrono::seconds(1);
    try {
      coordinator->take(static_cast<int>(below(3)), *told, now);
      while (const auto decided = coordinator->decide(now)) {
        for (const Batch& batch : decided->batches) EXPECT_FALSE(batch.ids.empty());
      }
      for (const Stall& stall : coordinator->stalls(now)) EXPECT_LE(stall.submitted.size(), 3u);
    } catch (const Error&) {
      coordinator.reset();  // a rank that submits a name twice ends the negotiation
    }
    return true;
  });
}

TEST_F(FuzzMessages, Decisions) {
  go("decisions", [&] { return understood(decision(), decode_decision).has_value(); });
}

TEST_F(FuzzMessages, GivingUps) {
  go("reasons to give up", [&] {
    const GivingUp sample{static_cast<int64_t>(number()), static_cast<Code>(below(kCodes)), text()};
    return understood(sample, decode_giving_up).has_value();
  });
}

// The two ranks' shared memory.
class Neighbouring final : public Carrier {
 public:
  explicit Neighbouring(Neighbours& neighbours) : neighbours_(neighbours) {}

  int rank() const override { return neighbours_.rank(); }
  int world_size() const override { return neighbours_.world_size(); }
  void wake(int peer) override { neighbours_.head(peer).event.notify_if_waiting(); }
  void abort(const Error& reason) override { neighbours_.abort(reason); }
  Error lost(int peer, bool lives, const std::string& title) const override {
    return neighbours_.lost(peer, lives, title);
  }

 private:
  Neighbours& neighbours_;
};

class FuzzMail : public Fuzz {
 protected:
  static constexpr size_t kPipe = 4096;

  FuzzMail() {
    std::vector<std::string> endpoints;
    for (int rank = 0; rank < 2; ++rank) {
      ranks_.push_back(std::make_unique<Neighbours>(rank, 2, Post::memory_bytes(2, kPipe), false));
      endpoints.push_back(ranks_.back()->endpoint());
    }
    spawn(2, [&](int rank) { ranks_[rank]->connect(endpoints, 30); });
  }

  std::vector<std::unique_ptr<Neighbours>> ranks_;
};

// Rank 1 writes frames into its pipe to rank 0 that no rank would write.
TEST_F(FuzzMail, Frames) {
  ByteRing pipe(ranks_[0]->body(0) + ByteRing::memory_bytes(kPipe), kPipe);
  go("frames of mail", [&] {
    Neighbouring carrier(*ranks_[0]);
    Post post(carrier, kPipe);
    const ByteRing own(ranks_[0]->body(0), kPipe);
    post.open({{own, own}, {pipe, ByteRing(ranks_[0]->body(1), kPipe)}});
    std::vector<std::vector<uint8_t>> memory;
    std::vector<Handle> receives;
    for (size_t left = below(4); left > 0; --left) {
      memory.emplace_back(one_in(2) ? below(64) : 600 + below(64));  // a page of its own: too much is seen
      const auto bytes = memory.back().size();
      receives.push_back(
          std::make_shared<Transit>(Transit::kReceive, memory.back().data(), bytes, 1, below(2)));
      post.start(receives.back());
    }
    std::string bytes;
    for (size_t left = 1 + below(4), id = 0; left > 0; --left) {
      const bool fits = !receives.empty() && !one_in(3);
      const uint64_t length = fits ? receives[below(receives.size())]->bytes : number();
      Frame frame{static_cast<FrameType>(below(5)), 0, ++id - below(2), static_cast<int64_t>(below(2)),
                  length};
      const bool carries = frame.type == FrameType::kMessage || frame.type == FrameType::kData;
      frame.payload = static_cast<uint32_t>(carries ? std::min<uint64_t>(length, 600) : 0);
      bytes.append(reinterpret_cast<const char*>(&frame), sizeof frame);
      bytes.append(frame.payload, 'x');
    }
    bytes = changed(std::move(bytes)).substr(0, kPipe);
    if (bytes.empty()) return false;
    pipe.put(bytes.data(), bytes.size());
    pipe.publish();
    while (post.read_frame(1)) {
    }
    EXPECT_EQ(pipe.unread(), 0u);
    const bool sound = !post.has_failed();
    post.fail(Error(Code::kAborted, "the end"));
    for (const Handle& receive : receives) EXPECT_TRUE(receive->done());
    EXPECT_EQ(post.pending(), 0u);
    // What rank 0 has answered is for rank 1 to read.
    ByteRing answers(ranks_[0]->body(1), kPipe);
    answers.pop(answers.unread());
    return sound;
  });
}

}  // namespace
}  // namespace dadt::fuzz_test
