// Tests of independent parts of the native runtime: the JSON reader, SHA-256, the callback engine,
// contexts in host memory, requests, and the functions in tensorrt_profiles.h.
//
// The library does not export the tested classes, so this program is compiled with the library's
// sources. Prints "N passed, N failed". The exit status is 1 if a check failed.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/json.h"
#include "base/sha256.h"
#include "base/utf8.h"
#include "decode/lockstep_passes.h"
#include "decode/runner.h"
#include "engines/cuda/device_cache.h"
#include "engines/engine.h"
#include "engines/tensorrt/tensorrt_profiles.h"
#include "tests.h"

namespace {

struct Tally {
  int passed = 0, failed = 0;
  void note(bool holds, const char* file, int line, const std::string& what) {
    ++(holds ? passed : failed);
    if (!holds) std::printf("%s:%d: failed: %s\n", file, line, what.c_str());
  }
};

#define CHECK(condition) tally.note((condition), __FILE__, __LINE__, #condition)
// Checks that the expression `code` throws an Error with status `status` and message `message`.
// If `message` starts with "...", the error's message must contain the text after the dots.
#define CHECK_ERROR(code, status, message) \
  check_error(tally, __FILE__, __LINE__, [&] { (void)(code); }, status, message)

void check_error(Tally& tally, const char* file, int line, const std::function<void()>& code,
                 dlm_status status, const std::string& message) {
  try {
    code();
    tally.note(false, file, line, "nothing was thrown, expected: " + message);
  } catch (const dlm::Error& error) {
    const std::string said = error.what();
    const bool is_part = message.compare(0, 3, "...") == 0;
    const bool fits = is_part ? said.find(message.substr(3)) != std::string::npos : said == message;
    tally.note(fits && error.status() == status, file, line,
               "got " + std::to_string(error.status()) + " " + said);
  }
}

constexpr size_t kLimit = 1 << 20;

std::unique_ptr<const dlm::json::Value> parse(const std::string& text) {
  return dlm::json::parse(text, kLimit);
}

const char kManifest[] = R"({
  "schema_version": 1,
  "denoiser": {"layers": 28, "rope": 1e6, "eps": -1.5E-06, "name": "LLaDA \u00e9 \ud83d\ude00 \"x\" \\ \/ \n", "shift": false,
               "eos": [126081, 126348, -0], "none": null},
  "presets": [{"name": "fast", "threshold": 0.9}, {"name": "größe", "threshold": 0.25, "seed": 9223372036854775807}],
  "files": {"denoiser.onnx": {"bytes": 18446744073709551615, "sha256": "00ff"}}, "empty": {}, "nothing": [], "": 0
}
)";

void test_json_values(Tally& tally) {
  const auto root = parse(kManifest);
  const dlm::json::Value& denoiser = root->object("denoiser");
  CHECK(root->integer("schema_version", 1, 1) == 1);
  CHECK(denoiser.integer("layers", 1, 65536) == 28);
  CHECK(denoiser.at("layers").number(0, 100) == 28.0);
  CHECK(denoiser.at("rope").number(0, 1e9) == 1e6);
  CHECK(denoiser.at("eps").number(-1, 1) == -1.5e-6);
  CHECK(denoiser.string("name") == "LLaDA \xc3\xa9 \xf0\x9f\x98\x80 \"x\" \\ / \n");
  CHECK(!denoiser.boolean("shift"));
  CHECK(denoiser.at("none").kind() == dlm::json::Value::Kind::null);
  CHECK(denoiser.find("absent") == nullptr);
  CHECK(denoiser.array("eos").size() == 3 && denoiser.array("eos")[2].integer(0, 0) == 0);
  CHECK(root->array("presets")[1].integer("seed", 0, INT64_MAX) == INT64_MAX);
  CHECK(root->object("empty").members().empty() && root->array("nothing").empty());
  CHECK(root->members()[3].key() == "files");
  CHECK(parse("  \"x\"\t\r\n")->string() == "x");
  CHECK(parse("[" + std::string(2 * (dlm::json::kMaxDepth - 1), ' ') + "]")->elements().empty());
  CHECK(parse(std::string(64, '[') + "1" + std::string(64, ']'))->elements().size() == 1);
  CHECK(parse("\"\xed\x9f\xbf\xee\x80\x80\xf4\x8f\xbf\xbf\\u0001\"")->string().size() == 11);
}

void test_json_accessors_name_the_path(Tally& tally) {
  const auto root = parse(kManifest);
  const dlm::json::Value &denoiser = root->object("denoiser"), &preset = root->array("presets")[1];
  const auto bad = DLM_BAD_BUNDLE;
  CHECK_ERROR(denoiser.integer("layers", 1, 4), bad,
              "denoiser.layers: expected an integer in 1..4, found 28");
  CHECK_ERROR(preset.integer("name", 1, 9), bad,
              "presets[1].name: expected an integer in 1..9, found \"gr\\xc3\\xb6\\xc3\\x9fe\"");
  CHECK_ERROR(denoiser.integer("rope", 0, 9), bad,
              "denoiser.rope: expected an integer in 0..9, found 1e6");
  CHECK_ERROR(preset.at("threshold").number(0.5, 1), bad,
              "presets[1].threshold: expected a number in 0.5..1, found 0.25");
  CHECK_ERROR(denoiser.boolean("none"), bad, "denoiser.none: expected true or false, found null");
  CHECK_ERROR(denoiser.string("shift"), bad, "denoiser.shift: expected a string, found false");
  CHECK_ERROR(denoiser.object("eos"), bad, "denoiser.eos: expected an object, found an array");
  CHECK_ERROR(root->array("denoiser"), bad, "denoiser: expected an array, found an object");
  CHECK_ERROR(denoiser.at("heads"), bad, "denoiser: the key \"heads\" is missing");
  CHECK_ERROR(root->at("heads"), bad, "the document: the key \"heads\" is missing");
  CHECK_ERROR(root->integer("", 1, 2), bad, "\"\": expected an integer in 1..2, found 0");
  const dlm::json::Value& file = root->object("files").object("denoiser.onnx");
  CHECK_ERROR(file.integer("bytes", 0, INT64_MAX), bad,
              "files.\"denoiser.onnx\".bytes: expected an integer in 0..9223372036854775807, found "
              "18446744073709551615");
  CHECK_ERROR(file.refuse_unknown({"bytes"}), bad,
              "files.\"denoiser.onnx\".sha256: unknown key; written by a newer dlm-export?");
  file.refuse_unknown({"sha256", "bytes"});
  CHECK(dlm::is_utf8("\xc3\xa9") && !dlm::is_utf8("\xc3"));
  CHECK(dlm::json::quoted("a\"\n\x7f\xff") == "\"a\\\"\\x0a\\x7f\\xff\"");
  CHECK(dlm::json::quoted(std::string(500, 'x')).size() <= 64);
}

void test_json_refuses(Tally& tally) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "line 1: expected a value, found the end of the text"},
      {"\n\n tru", "line 3: expected a value, found \"tru\""},
      {"{\"a\":1}\n{", "line 2: expected the end of the text, found \"{\""},
      {"{\"a\":1,\n\"b\":2,\n\"a\":3}", "line 3: the key \"a\" occurs twice"},
      {"{\"a\":1,}", "line 1: expected a key in double quotes, found \"}\""},
      {"{a:1}", "line 1: expected a key in double quotes, found \"a:1}\""},
      {"{\"a\" 1}", "line 1: expected ':' after the key \"a\", found \"1}\""},
      {"[1 2]", "line 1: expected ',' or ']', found \"2]\""},
      {"[1,]", "line 1: expected a value, found \"]\""},
      {"[1", "line 1: expected ',' or ']', found the end of the text"},
      {"\"abc", "line 1: a string is not closed: it starts with \"abc\""},
      {"\"a\tb\"", "...a control character in a string must be escaped"},
      {"\"\\x41\"", "line 1: unknown escape: \"\\\\x\""},
      {"\"\\u12", "...expected four hex digits"},
      {"\"\\u+123\"", "...expected four hex digits"},
      {"\"\\u0000\"", "...a string contains NUL"},
      {"\"\\ud800\"", "...unpaired surrogate"},
      {"\"\\udc00\"", "...unpaired surrogate"},
      {"\"\\ud800\\u0041\"", "...unpaired surrogate"},
      {"\"\\", "...unknown escape"},
      {"\"\xc0\x80\"", "...invalid UTF-8"},          // overlong
      {"\"\xed\xa0\x80\"", "...invalid UTF-8"},      // a surrogate
      {"\"\xf4\x90\x80\x80\"", "...invalid UTF-8"},  // beyond U+10FFFF
      {"\"\xe2\x82", "...invalid UTF-8"},            // truncated
      {"\"\x80\"", "...invalid UTF-8"},
      {"\xef\xbb\xbf{}",
       "line 1: expected a value, found \"\\xef\\xbb\\xbf{}\""},  // a byte order mark
      {"01", "line 1: a number starts with 0: \"01\""},
      {"-", "...not a number"},
      {"1.", "...not a number"},
      {".5", "...expected a value"},
      {"1e", "...not a number"},
      {"+1", "...expected a value"},
      {"1e999", "line 1: out of range for a double: \"1e999\""},
      {"NaN", "...expected a value"},
      {"Infinity", "...expected a value"},
      {"'a'", "...expected a value"},
      {"// no\n1", "...expected a value"},
      {std::string("1\0", 2), "...expected the end of the text"},
      {std::string(65, '['), "...nested deeper than 64 levels"},
      {std::string(100000, '['), "...nested deeper than 64 levels"},
      {std::string(kLimit + 1, ' '), "line 1: the text has 1048577 bytes; the limit is 1048576"},
  };
  for (const auto& [text, message] : cases) CHECK_ERROR(parse(text), DLM_BAD_BUNDLE, message);
  // If a path is long, a message contains only its end.
  std::string nested = "1";
  for (int i = 0; i < 60; ++i) nested = "{\"a_rather_long_key_that_repeats\":" + nested + "}";
  const auto root = parse(nested);
  const dlm::json::Value* value = root.get();
  while (value->kind() == dlm::json::Value::Kind::object) value = &value->members()[0];
  CHECK(value->path().size() < 300 && value->path().compare(0, 3, "...") == 0);
}

// The reader must accept damaged text or throw Error. Sanitizers detect crashes and wrong accesses.
void test_json_survives_mutations(Tally& tally) {
  uint32_t state = 12345;
  const auto random = [&](size_t below) {  // a linear congruential generator, so that every run
                                           // gives the same numbers
    state = state * 1664525u + 1013904223u;
    return static_cast<size_t>(state >> 8) % below;
  };
  const char alphabet[] = "{}[]\",:\\u0d8ef-+.19Eet \n\x00\x80\xc3\xed\xf4\xff";
  int read = 0, refused = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string text = kManifest;
    for (size_t changes = 1 + random(4); changes > 0; --changes) {
      const size_t at = random(text.size());
      switch (random(4)) {
        case 0:
          text[at] = alphabet[random(sizeof alphabet - 1)];
          break;
        case 1:
          text.erase(at, 1 + random(8));
          break;
        case 2:
          text.insert(at, 1, alphabet[random(sizeof alphabet - 1)]);
          break;
        default:
          text.insert(at, text.substr(random(text.size()), random(40)));
          break;
      }
    }
    try {
      const auto root = parse(text);
      ++read;
      for (const auto& member : root->members()) (void)member.path();
    } catch (const dlm::Error& error) {
      ++refused;
      const bool is_fine = error.status() == DLM_BAD_BUNDLE && std::strlen(error.what()) < 400;
      if (!is_fine) tally.note(false, __FILE__, __LINE__, error.what());
    }
  }
  CHECK(read + refused == 20000 && read > 100 && refused > 10000);
}

void test_json_canonical(Tally& tally) {
  // Python's json.dumps(value, sort_keys=True, separators=(",", ":")) wrote the expected text.
  const auto root = parse(
      "{ \"b\": [ -0, [], 7 , {} ], \"seal\": 1, \"B\": {\"seal\": \"\\\"\\\\/ ~\"},\n \"a.0\": "
      "[true, null]}");
  CHECK(root->canonical() ==
        R"({"B":{"seal":"\"\\/ ~"},"a.0":[true,null],"b":[0,[],7,{}],"seal":1})");
  CHECK(root->canonical("seal") == R"({"B":{"seal":"\"\\/ ~"},"a.0":[true,null],"b":[0,[],7,{}]})");
  CHECK_ERROR(parse("[1, 2.0]")->canonical(), DLM_BAD_BUNDLE, "...[1]: expected an integer in ");
  CHECK_ERROR(parse("[1e3]")->canonical(), DLM_BAD_BUNDLE, "...expected an integer");
  CHECK_ERROR(parse("{\"a\":\"\\u00e9\"}")->canonical(), DLM_BAD_BUNDLE,
              "a: must be printable ASCII, found \"\\xc3\\xa9\"");
  CHECK_ERROR(parse("{\"a\\n\":1}")->canonical(), DLM_BAD_BUNDLE,
              "the document: must be printable ASCII, found \"a\\x0a\"");
}

void test_sha256(Tally& tally) {
  // The messages are those of FIPS 180-2, appendix B, and the empty message of NIST's byte test
  // vectors.
  const std::vector<std::pair<std::string, const char*>> vectors = {
      {"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
      {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
      {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
       "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
      {std::string(1000000, 'a'),
       "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"},
  };
  for (const bool portable : {true, false}) {
    for (const auto& [text, hex] : vectors) {
      dlm::Sha256 hash(portable);
      hash.update(text.data(), text.size());
      CHECK(hash.hex() == hex);
    }
  }
  // Tests every length around SHA-256's block size. Both implementations hash the text as a whole,
  // and in pieces of every size. All of these hashes must be equal.
  bool agree = true;
  std::string text;
  for (size_t length = 0; length < 200; ++length, text += static_cast<char>(length * 37)) {
    dlm::Sha256 whole(true);
    whole.update(text.data(), length);
    const std::string expected = whole.hex();
    for (size_t piece = 1; piece < 140; piece += 3) {
      dlm::Sha256 pieces;
      for (size_t at = 0; at < length; at += piece)
        pieces.update(text.data() + at, std::min(piece, length - at));
      agree = agree && pieces.hex() == expected;
    }
  }
  CHECK(agree);
  CHECK_ERROR(dlm::sha256_file_hex("/no/such/file"), DLM_NOT_FOUND,
              "/no/such/file: No such file or directory");
  CHECK_ERROR(dlm::sha256_file_hex("/dev/zero"), DLM_BAD_BUNDLE, "/dev/zero: not a plain file");
  CHECK_ERROR(dlm::sha256_file_hex("/"), DLM_BAD_BUNDLE, "/: not a plain file");
  std::printf("sha256: %s instructions compared with the portable code\n",
              dlm::Sha256::is_accelerated() ? "the processor's" : "no");
}

dlm::Denoiser with_cache(const dlm::CacheShape& cache) {
  dlm::Denoiser denoiser{};
  denoiser.cache = cache;
  return denoiser;
}

void test_callback_engine(Tally& tally) {
  struct Seen {
    const dlm_pass* pass = nullptr;
    dlm_status answer = DLM_OK;
  } seen;
  const dlm_pass_fn note = [](void* user, const dlm_pass* pass) -> dlm_status {
    static_cast<Seen*>(user)->pass = pass;
    return static_cast<Seen*>(user)->answer;
  };
  const dlm::CacheShape cache{{1, 2, 4}};
  const auto engine = dlm::make_callback(note, &seen, with_cache(cache));
  const dlm::Pass pass{};
  engine->run(pass, {}, {});
  CHECK(seen.pass == &pass);
  CHECK(engine->description() == "callback");
  seen.answer = DLM_CANCELLED;
  CHECK_ERROR(engine->run(pass, {}, {}), DLM_CANCELLED,
              "the pass callback returned 7 (" + std::string(dlm_status_name(7)) + ")");
  seen.answer = -12;
  CHECK_ERROR(engine->run(pass, {}, {}), -12, "...the pass callback returned -12 (");
  CHECK_ERROR(dlm::make_callback(nullptr, nullptr, with_cache(cache)), DLM_INVALID_ARGUMENT,
              "the pass callback is NULL");
}

// Checks which cached rows each pass reads. A pass must see every row outside its own positions
// exactly once, as the last pass wrote it. The rows may be in any order. The content of a row
// encodes its layer, its head (counted over all requests of a batch), its position, and the pass
// that wrote it. Keys and values use different codes. As in some denoisers, layers have different
// numbers and sizes of heads. Two of the layers are the same.
struct Rows {
  dlm::CacheShape cache = {{3, 3, 2}, {1, 5, 2}, {3, 3, 2}, {2, 2, 2}};
  int passes = 0, wrong = 0;
  std::map<int, int> written;  // for each position, the last pass that wrote its rows
  const char* start = nullptr;
  bool is_growing = false;  // the rows may move to a larger buffer

  // Checks the rows that the pass reads, and writes the rows that it must write. Gives the highest
  // probability to the last scored row.
  static dlm_status run(void* user, const dlm_pass* pass) {
    static_cast<Rows*>(user)->check(*pass);
    return DLM_OK;
  }

 private:
  void check(const dlm_pass& pass) {
    const auto first = static_cast<int>(pass.position_ids[0]);
    std::map<int, int> wanted;
    for (int i = 0; i < pass.tokens + pass.cached; ++i)
      if (pass.cached > 0 && (i < first || i >= first + pass.tokens)) wanted[i] = written[i];
    ++passes;
    wrong += pass.layers != static_cast<int>(cache.size()) || pass.past_keys == nullptr ||
             pass.past_values == nullptr;
    wrong += pass.cached != static_cast<int>(wanted.size());
    for (int layer = 0; layer < pass.layers; ++layer)
      for (int kind = 0; kind < 2; ++kind) {
        const int heads = pass.batch * cache[static_cast<size_t>(layer)].kv_heads;
        const auto row_bytes = static_cast<int>(cache[static_cast<size_t>(layer)].row_bytes());
        const auto* const past =
            static_cast<const char*>((kind == 0 ? pass.past_keys : pass.past_values)[layer]);
        if (pass.cached == 0) wrong += past != nullptr;
        for (int head = 0; head < heads; ++head) {
          const char code = static_cast<char>(32 * layer + 16 * kind + head);
          std::map<int, int> there;
          for (int row = 0; row < pass.cached; ++row) {
            const char* const bytes = past + (head * pass.cached + row) * row_bytes;
            there[bytes[0]] = bytes[1];
            for (int i = 2; i < row_bytes; ++i) wrong += bytes[i] != code;
          }
          wrong += there != wanted;
          if (pass.present_keys == nullptr) continue;
          auto* const present =
              static_cast<char*>((kind == 0 ? pass.present_keys : pass.present_values)[layer]);
          for (int row = 0; row < pass.tokens; ++row) {
            char* const bytes = present + (head * pass.tokens + row) * row_bytes;
            std::memset(bytes, code, static_cast<size_t>(row_bytes));
            bytes[0] = static_cast<char>(pass.position_ids[row]);
            bytes[1] = static_cast<char>(passes);
          }
          if (layer + kind + head > 0) continue;
          // The context must not copy rows to append them, so the new rows must follow the cached
          // rows in memory.
          const char* const begins = present - heads * pass.cached * row_bytes;
          wrong += pass.cached > 0 && !is_growing && begins != start;
          start = begins;
        }
      }
    for (int i = 0; pass.present_keys != nullptr && i < pass.tokens; ++i)
      written[first + i] = passes;
    for (int row = 0; row < pass.batch * pass.rows; ++row) {
      pass.top_tokens[2 * row] = 1, pass.top_tokens[2 * row + 1] = 2;
      pass.top_probs[2 * row] = 0.5f + 0.01f * static_cast<float>(row % pass.rows),
                         pass.top_probs[2 * row + 1] = 0;
      pass.top_log_odds[2 * row] = pass.top_log_odds[2 * row + 1] = std::nanf("");
    }
  }
};

void test_host_contexts(Tally& tally) {
  Rows rows;
  const auto engine = dlm::make_callback(Rows::run, &rows, with_cache(rows.cache));
  const auto context = engine->open_context(1 << 10);
  std::vector<int64_t> positions(20);
  std::iota(positions.begin(), positions.end(), 0);
  int batch = 0;
  const auto make = [&](int first, int last, int length, dlm::CacheUse use) {
    const bool reads = use == dlm::CacheUse::read || use == dlm::CacheUse::refresh;
    dlm::Pass pass{};
    pass.batch = batch, pass.tokens = last - first, pass.cached = reads ? length - pass.tokens : 0;
    pass.position_ids = positions.data() + first;
    context->run(pass, use, false);
  };
  using dlm::CacheUse;
  for (const auto& [requests, length] :
       {std::pair{3, 20}, {1, 20}, {5, 11}}) {  // then passes over fewer rows, in the same memory
    const int behind = length - 2;
    batch = requests;
    make(0, length, length, CacheUse::write);
    CHECK(context->cache_bytes() ==
          static_cast<uint64_t>(2 * batch * length * (3 * 6 + 1 * 10 + 3 * 6 + 2 * 4)));
    context->keep_outside(3, 6);
    make(3, 6, length, CacheUse::read);
    make(3, 6, length, CacheUse::read);
    context->keep_outside(1, 9);
    make(1, 9, length, CacheUse::refresh);
    context->keep_outside(6, 9);
    make(6, 9, length, CacheUse::read);
    context->keep_outside(5, behind);
    make(5, behind, length, CacheUse::refresh);
    context->keep_outside(4, length);  // two refreshing passes, one directly after the other
    make(4, length, length, CacheUse::refresh);
    context->keep_outside(behind, length);
    make(behind, length, length, CacheUse::read);
    make(0, length, length, CacheUse::none);
  }
  CHECK(rows.passes == 27 && rows.wrong == 0);
  CHECK(engine->max_rows(1 << 24, 1 << 24) == INT32_MAX && engine->limits().empty() &&
        engine->max_batch() == INT32_MAX);
  const auto none = dlm::make_none(rows.cache);
  CHECK_ERROR(none->open_context(1 << 10)->run(dlm::Pass{}, dlm::CacheUse::none, false),
              DLM_UNSUPPORTED, "...opened with engine \"none\"");
}

// Runs passes over random ranges of positions. Each pass reads some or all of the rows that are
// cached after the previous pass.
void test_rows_through_random_ranges(Tally& tally) {
  uint32_t state = 1;
  const auto random = [&](int low, int high) {  // low and high are included
    state = state * 1664525u + 1013904223u;
    return low + static_cast<int>((state >> 8) % static_cast<uint32_t>(high - low + 1));
  };
  std::vector<int64_t> positions(24);
  std::iota(positions.begin(), positions.end(), 0);
  int wrong = 0;
  for (int sequence = 0; sequence < 200; ++sequence) {
    Rows rows;
    const auto engine = dlm::make_callback(Rows::run, &rows, with_cache(rows.cache));
    const auto context = engine->open_context(1 << 10);
    const int length = random(2, 24);
    dlm::Pass pass{};
    pass.batch = random(1, 5), pass.tokens = length, pass.position_ids = positions.data();
    context->run(pass, dlm::CacheUse::write, false);
    // The positions whose rows are not cached: `first` to `last` - 1. The next pass must include
    // them.
    int first = length, last = 0;
    for (int i = 0; i < 8; ++i) {
      first = random(0, std::min(first, length - 1)),
      last = random(std::max(last, first + 1), length);
      if (last - first == length) break;
      context->keep_outside(first, last);
      pass.tokens = last - first, pass.cached = length - pass.tokens,
      pass.position_ids = positions.data() + first;
      const bool is_kept = random(0, 2) > 0;
      context->run(pass, is_kept ? dlm::CacheUse::refresh : dlm::CacheUse::read, false);
      if (is_kept) first = length, last = 0;
    }
    wrong += rows.wrong;
  }
  CHECK(wrong == 0);
}

// Runs the given number of requests in lockstep.
template <class Make>
std::vector<std::shared_ptr<dlm::Job>> run_together(const dlm::Denoiser& denoiser,
                                                    dlm::Engine& engine, int32_t count, Make make) {
  dlm::LockstepPasses passes(denoiser, engine, {INT64_MAX, INT64_MAX}, 1);
  passes.set_together(static_cast<size_t>(count));
  dlm::Runner runner(denoiser, passes, {count});
  std::vector<std::shared_ptr<dlm::Job>> jobs;
  for (int32_t i = 0; i < count; ++i) jobs.push_back(runner.submit(make(), {}));
  runner.run(dlm::Runner::Until::idle, [] { return true; });
  return jobs;
}

// Tests many combinations of cache, block length and refresh, with a single canvas and with several
// canvases. Each pass checks the rows that it reads. With a sanitizer, this test also checks how
// rows are moved.
void test_rows_through_whole_requests(Tally& tally) {
  int cases = 0, wrong = 0;
  for (const char* cache : {"prefix", "dual"})
    for (int32_t batch = 1; batch <= 4; ++batch)
      for (const int32_t block_length : {1, 2, 5})
        for (const int32_t refresh : {0, 1, 5})
          for (const int32_t length : {7, 16}) {
            Rows rows;
            const auto engine = dlm::make_callback(Rows::run, &rows, with_cache(rows.cache));
            const dlm::Denoiser denoiser{4, 3, 64, 2, 0, true, rows.cache, {}};
            dlm_policy fields = dlm::default_policy();
            fields.cache = cache, fields.block_length = block_length, fields.refresh = refresh;
            const dlm::Policy policy = dlm::check_policy(fields);
            std::vector<int32_t> canvas(static_cast<size_t>(length), denoiser.mask_token_id);
            std::vector<uint8_t> undecided(canvas.size(), 1);
            canvas[0] = 1, undecided[0] = 0;
            const auto jobs = run_together(denoiser, *engine, batch, [&] {
              return dlm::Request(denoiser, *engine, policy, canvas, undecided, 0);
            });
            wrong += rows.wrong + (rows.passes != length - 1);
            ++cases;
          }
  CHECK(cases == 144 && wrong == 0);
}

// The cache `block` grows as rows are stored, and passes read these rows without copying them. With
// `reuse`, every pass over a block stores the block again. With `open`, the pass that stores a
// block also decides positions of the next block.
void test_rows_that_are_appended(Tally& tally) {
  int cases = 0, wrong = 0;
  for (const char* store : {"pass", "reuse", "open"})
    for (int32_t batch = 1; batch <= 4; ++batch)
      for (const int32_t visible_block : {1, 2, 5})
        for (const int32_t given : {1, 6})
          for (const int32_t length : {7, 23}) {
            Rows rows;
            rows.is_growing = true;
            const auto engine = dlm::make_callback(Rows::run, &rows, with_cache(rows.cache));
            const dlm::Denoiser denoiser{4, 3, 64, 2, 0, true, rows.cache, {}, visible_block};
            dlm_policy fields = dlm::default_policy();
            fields.cache = "block", fields.block_length = 0, fields.store = store;
            const dlm::Policy policy = dlm::check_policy(fields);
            std::vector<int32_t> canvas(static_cast<size_t>(length), denoiser.mask_token_id);
            std::vector<uint8_t> undecided(canvas.size(), 1);
            for (size_t i = 0; i < static_cast<size_t>(given); ++i) canvas[i] = 1, undecided[i] = 0;
            const auto jobs = run_together(denoiser, *engine, batch, [&] {
              return dlm::Request(denoiser, *engine, policy, canvas, undecided, 0);
            });
            // all jobs are equal, so the first job's statistics are enough
            const dlm_stats& counts = *jobs[0]->result().stats;
            // Requests with `reuse` never run together.
            const int32_t turns = std::strcmp(store, "reuse") == 0 ? batch : 1;
            // In this test, every pass decides one position. So a pass that opens a block also
            // decides one position of this block.
            const bool opens = std::strcmp(store, "open") == 0;
            wrong += rows.wrong + (counts.denoise_passes +
                                       (opens ? counts.prefill_passes + counts.store_passes : 0) !=
                                   length - given);
            wrong +=
                counts.nfe * turns != rows.passes ||
                counts.nfe != counts.prefill_passes + counts.denoise_passes + counts.store_passes;
            ++cases;
          }
  CHECK(cases == 144 && wrong == 0);
}

// Fills a canvas, and returns the order in which positions were decided. The denoiser predicts
// token 10 + position, and is most certain of the leftmost position.
std::vector<int32_t> fill(const dlm_policy& policy, std::vector<int32_t> canvas,
                          std::vector<uint8_t> undecided, Tally& tally) {
  const dlm::Denoiser denoiser{40, 9, 64, 2, 0, false, {{1, 2, 4}}, {12}};
  const auto engine = dlm::make_none(denoiser.cache);
  dlm::Request request(denoiser, *engine, dlm::check_policy(policy), std::move(canvas),
                       std::move(undecided), 0);
  dlm::Proposals proposals;
  for (int pass = 0; !request.done() && pass < 20; ++pass) {
    const size_t rows = request.find_positions();
    std::vector<int32_t> tokens(2 * rows);
    std::vector<float> probs(2 * rows), log_odds(2 * rows, std::nanf("")), entropy(rows);
    for (size_t row = 0; row < rows; ++row) {
      const int32_t position = request.positions()[row];
      CHECK(request.undecided()[static_cast<size_t>(position)] == 1);
      tokens[2 * row] = 10 + position;
      probs[2 * row] = 0.9f - 0.01f * static_cast<float>(position);
    }
    request.step({tokens.data(), probs.data(), log_odds.data(), entropy.data(), nullptr},
                 proposals);
  }
  CHECK(request.done() && request.undecided() == std::vector<uint8_t>(request.canvas().size(), 0));
  return request.canvas();
}

// Proposes the least likely token for each position, with the highest score for the last position.
// Records the calls of note().
class Least final : public dlm::Proposer {
 public:
  Least(int32_t vocab_size, std::map<int32_t, int32_t>& told)
      : vocab_size_(vocab_size), told_(told) {}

  dlm::Needs needs(const dlm::Turn&) const override { return {false, true}; }
  void propose(const dlm::Turn& turn, const dlm::Predictions& predictions,
               dlm::Proposals& proposals) override {
    for (size_t row = 0; row < turn.positions.size(); ++row) {
      const float* const logits = predictions.logits + row * static_cast<size_t>(vocab_size_);
      proposals.tokens[row] =
          static_cast<int32_t>(std::min_element(logits, logits + vocab_size_) - logits);
      proposals.scores[row] = 0.1 * turn.positions[row], proposals.probs[row] = 0.5;
    }
  }
  void note(int32_t position, int32_t token) override { told_[position] = token; }

 private:
  const int32_t vocab_size_;
  std::map<int32_t, int32_t>& told_;
};

// Runs two requests with different rules and proposers in one batch. If one of the requests needs
// an optional output, the pass must compute it.
void test_proposers_side_by_side(Tally& tally) {
  struct Seen {
    int with_logits = 0, with_entropy = 0, passes = 0;
  } seen;
  const dlm_pass_fn run = [](void* user, const dlm_pass* pass) -> dlm_status {
    auto& counts = *static_cast<Seen*>(user);
    ++counts.passes;
    counts.with_logits += pass->logits != nullptr;
    counts.with_entropy += pass->entropy != nullptr;
    for (int32_t row = 0; row < pass->batch * pass->rows; ++row) {
      const int64_t* const of_request = pass->position_ids + row / pass->rows * pass->tokens;
      pass->top_tokens[2 * row] = 1, pass->top_tokens[2 * row + 1] = 2;
      pass->top_probs[2 * row] = 0.9f, pass->top_probs[2 * row + 1] = 0.1f;
      for (int32_t v = 0; pass->logits != nullptr && v < 30; ++v)
        pass->logits[row * 30 + v] = v == 20 + of_request[pass->score_rows[row]] ? -1.0f : 0.0f;
    }
    return DLM_OK;
  };
  const dlm::Denoiser denoiser{30, 9, 64, 2, 0, false, {{1, 2, 4}}, {}};
  const auto engine = dlm::make_callback(run, &seen, denoiser);
  const dlm::Policy policy = dlm::check_policy(dlm::default_policy());
  std::map<int32_t, int32_t> told;
  dlm::LockstepPasses passes(denoiser, *engine, {INT64_MAX, INT64_MAX}, 1);
  passes.set_together(2);
  dlm::Runner runner(denoiser, passes, {2});
  std::vector<std::shared_ptr<dlm::Job>> jobs;
  for (const bool is_own : {false, true}) {
    std::unique_ptr<dlm::Proposer> own;
    if (is_own) own = std::make_unique<Least>(30, told);
    jobs.push_back(runner.submit(
        dlm::Request(denoiser, *engine, policy, std::vector<int32_t>{3, 9, 9, 9, 9},
                     std::vector<uint8_t>{0, 1, 1, is_own, is_own}, 0, std::move(own)),
        {}));
  }
  std::vector<std::vector<int32_t>> canvases;
  while (!jobs[1]->wait(dlm::Clock::duration(0))) {
    runner.run(dlm::Runner::Until::pass, [] { return true; });
    canvases.push_back(jobs[1]->request().canvas());
  }
  CHECK((jobs[0]->request().canvas() == std::vector<int32_t>{3, 1, 1, 9, 9}) &&
        jobs[0]->request().nfe() == 2);
  CHECK((canvases[0] == std::vector<int32_t>{3, 9, 9, 9, 24}) &&
        (canvases[1] == std::vector<int32_t>{3, 9, 9, 23, 24}));
  CHECK((jobs[1]->request().canvas() == std::vector<int32_t>{3, 21, 22, 23, 24}) &&
        jobs[1]->request().nfe() == 4);
  CHECK((told == std::map<int32_t, int32_t>{{1, 21}, {2, 22}, {3, 23}, {4, 24}}));
  CHECK(seen.passes == 4 && seen.with_logits == 4 && seen.with_entropy == 0);
}

// An engine that accepts only one canvas per pass cannot run requests with guidance, which need two
// canvases.
void test_guidance_is_refused_where_passes_take_one_request(Tally& tally) {
  class One final : public dlm::HostEngine {
   public:
    using HostEngine::HostEngine;
    void run(const dlm::Pass&, const std::vector<dlm::Segment>&, const dlm::WindowRows&) override {}
    std::string description() const override { return "one"; }
    int32_t max_batch() const override { return 1; }
  };
  const dlm::Denoiser denoiser{30, 9, 64, 2, 0, false, {{1, 2, 4}}, {}};
  const One engine(denoiser.cache);
  dlm_policy policy = dlm::default_policy();
  policy.cfg_scale = 1.5;
  CHECK_ERROR(dlm::Request(denoiser, engine, dlm::check_policy(policy), {1, 9}, {0, 1}, 0),
              DLM_UNSUPPORTED, "...cfg_scale = 1.5 needs two canvases per pass");
}

void test_undecided_is_not_the_mask_token(Tally& tally) {
  dlm_policy policy = dlm::default_policy();
  policy.block_length = 2;
  policy.stop = "none";
  // A given mask token (9) stays in the canvas. A token at an undecided position is replaced.
  CHECK((fill(policy, {9, 9, 5, 7, 9, 3}, {0, 1, 1, 0, 0, 1}, tally) ==
         std::vector<int32_t>{9, 11, 12, 7, 9, 15}));
  // Token 12 is the end token, and is committed at position 2. With stop "none", this has no
  // effect. With stop "eos", the undecided positions of later blocks become end tokens.
  CHECK((fill(policy, {1, 9, 9, 9, 8, 9}, {0, 1, 1, 0, 1, 1}, tally) ==
         std::vector<int32_t>{1, 11, 12, 9, 14, 15}));
  policy.stop = "eos";
  CHECK((fill(policy, {1, 9, 9, 9, 8, 9}, {0, 1, 1, 0, 1, 1}, tally) ==
         std::vector<int32_t>{1, 11, 12, 9, 12, 12}));
}

void test_tensorrt_plans(Tally& tally) {
  using dlm::trt::choose_profile, dlm::trt::rows_bucket, dlm::trt::why_not;
  dlm::EngineSpec engine;
  engine.target = "mine", engine.builder = "tensorrt", engine.version = "10.14.1.48",
  engine.sm = {89, 120};
  engine.prefill = {{1, 256, 512}, {0, 0, 0}, {1, 8, 64}};
  engine.block = {{1, 32, 32}, {0, 256, 512}, {1, 8, 32}};
  // Passes without cached tokens use the profile `prefill` at any length. Passes with cached tokens
  // use `block`.
  CHECK(choose_profile(engine, 512, 0) == 0 && choose_profile(engine, 8, 0) == 0 &&
        choose_profile(engine, 8, 1) == 1);
  CHECK(choose_profile(engine, 32, 512) == 1 && choose_profile(engine, 33, 1) == -1 &&
        choose_profile(engine, 513, 0) == -1);
  CHECK(choose_profile(engine, 1, 513) == -1);
  engine.prefill.tokens.smallest = 64;  // then short passes without cached tokens use block
  CHECK(choose_profile(engine, 32, 0) == 1 && choose_profile(engine, 33, 0) == -1);
  engine.prefill.cached = {0, 256, 512};  // and prefill takes the passes with cached tokens that
                                          // block cannot run
  CHECK(choose_profile(engine, 100, 100) == 0 && choose_profile(engine, 32, 100) == 1);

  const dlm::Sizes rows{1, 8, 30};
  bool is_right = true;
  for (int32_t tokens = 1; tokens <= 40; ++tokens)
    for (int32_t wanted = 1; wanted <= std::min(tokens, 30); ++wanted) {
      const int32_t bucket = rows_bucket(wanted, tokens, rows);
      is_right =
          is_right && bucket >= wanted && bucket <= 30 && bucket <= tokens && bucket - wanted < 8;
      is_right = is_right && (bucket % 8 == 0 || bucket == tokens || bucket == 30);
    }
  CHECK(is_right);
  // One row is needed, but the profile does not accept fewer than 4 rows.
  CHECK(rows_bucket(1, 2, {4, 8, 32}) == 4);
  // The result is never below the number of needed rows, even if the pass has fewer tokens.
  CHECK(rows_bucket(3, 1, {1, 8, 32}) == 3);

  const auto sizes = dlm::trt::largest(engine);
  CHECK(sizes.tokens == 512 && sizes.cached == 512 && sizes.rows == 64);
  CHECK((dlm::lay_out({0, 1, 256, 257, 8}) == std::vector<size_t>{0, 256, 512, 768, 1280, 1536}));

  CHECK(why_not(engine, {120, "tensorrt", "10.14.1.48"}).empty() &&
        why_not(engine, {89, "tensorrt", "10.14.1.48"}).empty());
  CHECK(why_not(engine, {121, "tensorrt", "10.14.1.48"}) ==
        "built for SM 8.9, 12.0, this device is SM 12.1");
  CHECK(why_not(engine, {120, "tensorrt", "10.14.1.4"}) ==
        "built by tensorrt 10.14.1.48, the library here is tensorrt 10.14.1.4");
  CHECK(why_not(engine, {120, "tensorrt_rtx", "10.14.1.48"}) ==
        "built by tensorrt 10.14.1.48, the library here is tensorrt_rtx 10.14.1.48");
  const dlm::trt::Platform lean{120, "tensorrt", "10.14.1.48", true};
  CHECK(why_not(engine, lean).find("--version-compatible") != std::string::npos);
  engine.is_version_compatible = true;
  CHECK(why_not(engine, lean).empty());
  CHECK(why_not(engine, {120, "tensorrt", "10.16.1.11"}) ==
        "built by tensorrt 10.14.1.48, the library here is tensorrt 10.16.1.11 (to run it, set "
        "DLM_TENSORRT to a libnvinfer_lean of its version)");
  engine.prefill.cached = {0, 0, 0};
  CHECK(dlm::trt::limits_text(engine) ==
        "passes of 64..512 tokens that score up to 64 rows, and passes of 1..32 tokens over 0..512 "
        "cached ones that score up to "
        "32 rows");
}

}  // namespace

int native_test(int, char**) {
  Tally tally;
  test_json_values(tally);
  test_json_accessors_name_the_path(tally);
  test_json_refuses(tally);
  test_json_survives_mutations(tally);
  test_json_canonical(tally);
  test_sha256(tally);
  test_callback_engine(tally);
  test_host_contexts(tally);
  test_rows_through_random_ranges(tally);
  test_rows_through_whole_requests(tally);
  test_rows_that_are_appended(tally);
  test_proposers_side_by_side(tally);
  test_guidance_is_refused_where_passes_take_one_request(tally);
  test_undecided_is_not_the_mask_token(tally);
  test_tensorrt_plans(tally);
  std::printf("%d passed, %d failed\n", tally.passed, tally.failed);
  return tally.failed == 0 ? 0 : 1;
}
