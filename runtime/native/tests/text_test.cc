// Tests of compiled text files. The reader must reject a damaged file, or the resulting Text must
// be safe to use. This program also tests some small functions.
//
// text_test FILE...: the arguments are valid files that `dlm_export.text` compiled. The library
// does not export the tested classes, so this program is compiled with the library's sources.
// Prints "N passed, N failed". The exit status is 1 if a check failed.
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/utf8.h"
#include "tests.h"
#include "text/chat_segments.h"
#include "text/tokenizer.h"

namespace {

int passed = 0, failed = 0;

void check(bool holds, int line, const char* what) {
  ++(holds ? passed : failed);
  if (!holds) std::printf("text_test.cc:%d: failed: %s\n", line, what);
}
#define CHECK(condition) check((condition), __LINE__, #condition)

const char* const kTexts[] = {"",
                              " ",
                              "a",
                              "it's  12:45 \n\n\t x",
                              "{\"name\":\"x\",\"arguments\":{\"",
                              "e\xCC\x81\xCC\xA3 \xEA\xB0\x80 \xF0\x9F\x99\x82",
                              "\xE2\x96\x81x \xE2\x96\x81",
                              "<|im_start|>user <s></s> <|eos|>",
                              "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"};

// Encodes and decodes texts, and renders chats. Even if the file was damaged, memory accesses must
// stay in bounds, and texts must consist of whole characters.
void use(const std::shared_ptr<const dlm::Text>& text) {
  std::vector<int32_t> ids;
  for (const char* const each : kTexts) {
    text->encode(each, {true, true}, ids);
    try {
      text->encode(each, {}, ids);
    } catch (const dlm::Error& error) {
      CHECK(error.status() == DLM_INVALID_ARGUMENT);  // the text has a special token
    }
    for (const int32_t id : ids) CHECK(id >= 0 && id < text->file().vocab_size);
  }
  dlm::TextDecoder decoder(text);
  std::string decoded;
  for (int32_t id = -2; id < std::min(text->file().vocab_size + 2, 4000); ++id)
    decoder(&id, 1, false, decoded);
  decoder(ids.data(), ids.size(), true, decoded);
  CHECK(dlm::is_utf8(decoded));
  for (const char* const role : {"system", "user", "assistant", "tool"})
    for (const char* const content : {"", " x ", "</think>"}) {
      try {
        CHECK(dlm::is_utf8(
            dlm::render_chat(
                text->file(),
                {{role, content}, {"user", content}, {"assistant", "y"}, {role, content}})
                .text));
      } catch (const dlm::Error& error) {
        CHECK(error.status() == DLM_INVALID_ARGUMENT || error.status() == DLM_UNSUPPORTED);
      }
    }
}

// Returns true if the file is accepted. If it is rejected, there must be a message.
bool is_read(const std::string& data) {
  try {
    const auto text = std::make_shared<const dlm::Text>(data.data(), data.size(), "it");
    use(text);
    return true;
  } catch (const dlm::Error& error) {
    CHECK(error.status() == DLM_BAD_BUNDLE || error.status() == DLM_UNSUPPORTED);
    CHECK(std::strncmp(error.what(), "it: ", 4) == 0);
    return false;
  }
}

void test_damaged_files(const std::string& whole, std::mt19937& random) {
  CHECK(is_read(whole));
  const auto draw = [&](size_t low, size_t high) {
    return std::uniform_int_distribution<size_t>(low, high)(random);
  };
  for (size_t cut = 0; cut < 200; ++cut)
    CHECK(!is_read(whole.substr(0, cut < 120 ? cut : draw(0, whole.size() - 1))));
  CHECK(!is_read(whole + '\0'));
  constexpr size_t header = 100;
  constexpr int32_t values[] = {-1, 0, 1, 2, 255, 256, 0x110000, 1 << 30, INT32_MAX, INT32_MIN};
  for (size_t at = 8; at < header; at += 4)
    for (const int32_t value : values) {
      std::string hostile = whole;
      std::memcpy(hostile.data() + at, &value, 4);
      is_read(hostile);
    }
  for (size_t change = 0; change < 1500; ++change) {
    std::string hostile = whole;
    for (size_t times = draw(1, 3); times-- > 0;) {
      const size_t number = draw(0, hostile.size() / 4 - 1);
      if (change % 2 == 0)
        std::memcpy(hostile.data() + 4 * number, &values[draw(0, 9)], 4);
      else
        hostile[draw(0, hostile.size() - 1)] ^= static_cast<char>(1 << draw(0, 7));
    }
    is_read(hostile);
  }
}

void test_utf8() {
  std::string all;
  for (char32_t point = 0; point < dlm::kCodePoints; point += point < 0x3000 ? 1 : 251) {
    if (!dlm::is_scalar(static_cast<int32_t>(point))) continue;
    std::string one;
    dlm::append_char(point, one);
    size_t at = 0;
    CHECK(dlm::is_utf8(one) && dlm::next_char(one, at) == point && at == one.size());
    const dlm::Utf8Start start = dlm::utf8_start(one);
    CHECK(start.kind == dlm::Utf8Start::whole && start.bytes == one.size());
    for (size_t cut = 1; cut < one.size(); ++cut) {
      CHECK(dlm::utf8_start(one.substr(0, cut)).kind == dlm::Utf8Start::cut);
      CHECK(dlm::utf8_start(one.substr(0, cut) + "a").kind == dlm::Utf8Start::broken);
    }
  }
  for (const char* const broken : {"\x80", "\xC0\x80", "\xC1", "\xE0\x9F\xBF", "\xED\xA0\x80",
                                   "\xF0\x8F\xBF\xBF", "\xF4\x90\x80\x80", "\xF5", "\xFF"})
    CHECK(dlm::utf8_start(broken).kind == dlm::Utf8Start::broken &&
          dlm::utf8_start(broken).bytes == 1);
}

void test_text_that_is_none(const std::string& whole) {
  const dlm::Text text(whole.data(), whole.size(), "it");
  std::vector<int32_t> ids;
  for (const auto& [given, at] :
       {std::pair{"ab\xFF", 2}, {"\xC3", 0}, {"a\xED\xA0\x80", 1}, {"\xE2\x82 x", 0}}) {
    try {
      text.encode(given, {}, ids);
      check(false, __LINE__, "what is no UTF-8 was encoded");
    } catch (const dlm::Error& error) {
      CHECK(error.status() == DLM_INVALID_ARGUMENT);
      CHECK(std::string(error.what()) ==
            "the text is not UTF-8: byte " + std::to_string(at) + " starts no whole character");
    }
  }
  CHECK(ids.empty());
}

}  // namespace

int text_test(int argc, char** argv) {
  std::mt19937 random(7);
  test_utf8();
  for (int i = 1; i < argc; ++i) {
    std::ifstream file(argv[i], std::ios::binary);
    const std::string whole((std::istreambuf_iterator<char>(file)),
                            std::istreambuf_iterator<char>());
    test_damaged_files(whole, random);
    test_text_that_is_none(whole);
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}
