// Runs an engine for GPUs on mock libraries of CUDA, and of TensorRT or ONNX Runtime. Runs the same
// requests with a callback engine in host memory, and compares the results of both.
// tests/test_native_tensorrt.py and tests/test_providers.py run this program, mostly with
// sanitizers.
//
// The layers of a bundle may have different sizes, but a callback engine has one size for all
// layers. So each layer of the callback engine has one head, which is as wide as the bundle's
// widest layer. Each pass copies the rows to the bundle's layout, and back.
//
//   device_driver BUNDLE [KEY=VALUE ...]
//     layers            for each layer KV_HEADSxHEAD_SIZE, separated by commas
//     cycle             round r generates r % cycle tokens more than round 0
//     alternate         1: every second round generates as many tokens as round 0
//     batch             number of requests per call, all with the same tokens
//     max_batch         number of these requests that run at the same time
//     steps             passes per block; 0: one pass per position
//     cfg_scale         scale of the guidance, in tenths
//     temperature       in tenths; 0: the most likely tokens
//     top_p             in tenths
//     cache, refresh, commit, score, score_of, remask, block, given, new, infill, rounds, threads,
//     logits, engine, provider, device, allow_fallback, cuda_graphs, top_k, top_log_probs
//
// Lines of the log are printed as "log text". The first other line is "open STATUS text". Then each
// thread prints a line "round STATUS text" per round. Its text is "same" if both engines gave the
// same canvas or logits. The line "counts NAME=NUMBER ..." follows each round. The last line is
// "live N".
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "dlm_runtime.h"
#include "mock_cuda.h"
#include "mock_denoiser.h"

namespace {

std::map<std::string, std::string> options = {
    {"layers", ""},         {"cache", "none"},  {"commit", "static"},    {"score", "confidence"},
    {"block", "8"},         {"given", "5"},     {"new", "24"},           {"infill", "0"},
    {"rounds", "1"},        {"threads", "1"},   {"logits", "0"},         {"engine", "tensorrt"},
    {"provider", "cpu"},    {"device", "0"},    {"allow_fallback", "0"}, {"cycle", "1"},
    {"alternate", "0"},     {"refresh", "0"},   {"batch", "0"},          {"max_batch", "1"},
    {"remask", "none"},     {"steps", "0"},     {"cuda_graphs", "0"},    {"score_of", "prediction"},
    {"top_log_probs", "0"}, {"cfg_scale", "0"}, {"top_k", "0"},          {"temperature", "0"},
    {"top_p", "10"}};

int number(const char* key) { return std::atoi(options[key].c_str()); }

// Converts the rows of a layer from the callback engine's layout [rows, width] to the bundle's
// layout [kv_heads, rows, row_bytes], and back.
std::vector<uint8_t> unpack(const mock::Layer& layer, const uint8_t* packed, int32_t rows,
                            int32_t width) {
  std::vector<uint8_t> out(static_cast<size_t>(layer.bytes(rows)));
  for (int32_t head = 0; head < layer.kv_heads; ++head)
    for (int32_t row = 0; row < rows; ++row)
      std::memcpy(out.data() + (ptrdiff_t{head} * rows + row) * layer.row_bytes,
                  packed + ptrdiff_t{row} * width + ptrdiff_t{head} * layer.row_bytes,
                  static_cast<size_t>(layer.row_bytes));
  return out;
}

void pack(const mock::Layer& layer, const std::vector<uint8_t>& from, uint8_t* packed, int32_t rows,
          int32_t width) {
  for (int32_t head = 0; head < layer.kv_heads; ++head)
    for (int32_t row = 0; row < rows; ++row)
      std::memcpy(packed + ptrdiff_t{row} * width + ptrdiff_t{head} * layer.row_bytes,
                  from.data() + (ptrdiff_t{head} * rows + row) * layer.row_bytes,
                  static_cast<size_t>(layer.row_bytes));
}

int32_t widest(const mock::Shape& shape) {
  int32_t width = 0;
  for (const mock::Layer& layer : shape.layers)
    width = std::max(width, static_cast<int32_t>(layer.bytes(1)));
  return width;
}

dlm_status run_pass(void* user, const dlm_pass* p) {
  const auto& shape = *static_cast<const mock::Shape*>(user);
  const int32_t width = widest(shape);
  for (int32_t request = 0; request < p->batch; ++request) {
    mock::Pass pass{};
    const ptrdiff_t token = ptrdiff_t{request} * p->tokens, row = ptrdiff_t{request} * p->rows;
    const ptrdiff_t bytes = ptrdiff_t{request} * width;
    pass.tokens = p->tokens, pass.cached = p->cached, pass.rows = p->rows;
    pass.ids = p->input_ids + token, pass.positions = p->position_ids + token,
    pass.score_rows = p->score_rows + row;
    pass.top_tokens = p->top_tokens + row * shape.top_k,
    pass.top_probs = p->top_probs + row * shape.top_k,
    pass.top_log_odds = p->top_log_odds + row * shape.top_k;
    pass.entropy = p->entropy == nullptr ? nullptr : p->entropy + row;
    pass.logits = p->logits == nullptr ? nullptr : p->logits + row * shape.vocab;
    if (const int32_t width = shape.conditioning; width > 0) {
      pass.conditioning = p->conditioning + token * width;
      pass.temperature = p->temperature + row;
      if (p->next_conditioning != nullptr)
        pass.next_conditioning = p->next_conditioning + row * width;
    }
    // Past and present keys and values of every layer.
    std::vector<std::vector<uint8_t>> pasts, presents;
    for (size_t i = 0; i < shape.layers.size(); ++i)
      for (const void* const past : {p->past_keys[i], p->past_values[i]}) {
        pasts.push_back(unpack(shape.layers[i],
                               static_cast<const uint8_t*>(past) + bytes * p->cached, p->cached,
                               width));
        presents.emplace_back(static_cast<size_t>(shape.layers[i].bytes(p->tokens)));
      }
    for (const auto& past : pasts) pass.past.push_back(past.data());
    for (auto& present : presents) pass.present.push_back(present.data());
    mock::denoise(shape, pass);
    for (size_t i = 0; p->present_keys != nullptr && i < presents.size(); ++i) {
      void* const present = (i % 2 == 0 ? p->present_keys : p->present_values)[i / 2];
      pack(shape.layers[i / 2], presents[i], static_cast<uint8_t*>(present) + bytes * p->tokens,
           p->tokens, width);
    }
  }
  return DLM_OK;
}

struct Answer {
  dlm_status status = DLM_INTERNAL;
  std::string message;
  std::vector<int32_t> canvas;
  std::vector<float> logits;
  dlm_stats stats{};
};

Answer ask(dlm_session* session, const dlm_denoiser& denoiser, int thread, int round) {
  Answer answer;
  dlm_policy policy;
  dlm_request generate;
  dlm_policy_init(&policy, sizeof policy);
  dlm_request_init(&generate, sizeof generate);
  policy.cache = options["cache"].c_str();
  policy.commit = options["commit"].c_str();
  policy.score = options["score"].c_str();
  policy.block_length = number("block");
  policy.refresh = number("refresh");
  policy.remask = options["remask"].c_str();
  policy.steps_per_block = number("steps");
  policy.score_of = options["score_of"].c_str();
  policy.cfg_scale = number("cfg_scale") / 10.0;
  if (number("temperature") > 0) {
    policy.select = "sample", policy.seed = 5, policy.temperature = number("temperature") / 10.0;
    policy.top_p = number("top_p") / 10.0, policy.top_k = number("top_k");
  }
  policy.threshold = 0.7;
  generate.policy = &policy;
  const int more = number("alternate") == 0 ? round : round % 2 == 0 ? 0 : round / 2;
  generate.new_tokens = number("new") + thread + more % number("cycle");
  if (generate.new_tokens == 0) generate.max_new_tokens = 0;
  generate.top_log_probs = number("top_log_probs");
  const auto given = static_cast<size_t>(number("given"));
  std::vector<int32_t> canvas(given);
  for (size_t i = 0; i < given; ++i)
    canvas[i] = number("infill") != 0 && i % 3 == 1 ? denoiser.mask_token_id
                                                    : static_cast<int32_t>(i) % 7 + thread;
  if (const int rows = number("logits"); rows > 0) {
    std::vector<int32_t> wanted;
    for (int i = 0; i < rows; ++i) wanted.push_back(i * 5 % static_cast<int>(given));
    answer.logits.resize(wanted.size() * static_cast<size_t>(denoiser.vocab_size));
    answer.status = dlm_session_logits(session, canvas.data(), given, wanted.data(), wanted.size(),
                                       answer.logits.data(), answer.logits.size());
  } else if (const int batch = number("batch"); batch > 0) {
    generate.tokens = canvas.data(), generate.token_count = given;
    const std::vector<const dlm_request*> requests(static_cast<size_t>(batch), &generate);
    answer.status =
        dlm_session_generate_batch(session, requests.data(), requests.size(), number("max_batch"));
    for (size_t i = 0; answer.status == DLM_OK && i < requests.size(); ++i) {
      const dlm_result* result = nullptr;
      answer.status = dlm_session_result(session, i, &result);
      answer.canvas.insert(answer.canvas.end(), result->tokens, result->tokens + result->length);
      answer.stats.nfe += result->stats->nfe;
      answer.stats.cache_bytes += result->stats->cache_bytes;
    }
  } else {
    generate.tokens = canvas.data(), generate.token_count = given;
    const dlm_result* result = nullptr;
    answer.status = dlm_session_generate(session, &generate, &result);
    if (answer.status == DLM_OK) {
      answer.canvas.assign(result->tokens, result->tokens + result->length);
      answer.stats = *result->stats;
    }
  }
  answer.message = dlm_session_last_error(session);
  return answer;
}

struct Session {
  Session(dlm_bundle* bundle) {
    status = dlm_session_create(bundle, message, sizeof message, &handle);
  }
  ~Session() { dlm_session_destroy(handle); }
  Session(const Session&) = delete;
  char message[2048] = "";
  dlm_status status;
  dlm_session* handle = nullptr;
};

}  // namespace

int main(int argc, char** argv) {
  for (int i = 2; i < argc; ++i) {
    const std::string argument = argv[i];
    const size_t equals = argument.find('=');
    const std::string key = argument.substr(0, equals);
    if (equals == std::string::npos || options.count(key) == 0) {
      std::fprintf(stderr, "usage: device_driver BUNDLE [KEY=VALUE ...]\n");
      return 2;
    }
    options[key] = argument.substr(equals + 1);
  }
  char message[2048] = "";
  dlm_open_options open;
  dlm_bundle *bundle = nullptr, *callback = nullptr;
  dlm_open_options_init(&open, sizeof open);
  open.engine = options["engine"].c_str();
  open.provider = options["provider"].c_str();
  open.device = number("device");
  open.allow_fallback = number("allow_fallback");
  open.cuda_graphs = number("cuda_graphs");
  open.on_log = [](void*, int32_t, const char* text) { std::printf("log %s\n", text); };
  const dlm_status opened = argc > 1
                                ? dlm_bundle_open(argv[1], &open, message, sizeof message, &bundle)
                                : DLM_INVALID_ARGUMENT;
  std::printf("open %s %s\n", dlm_status_name(opened),
              opened == DLM_OK ? dlm_bundle_describe(bundle)->engine : message);
  if (opened == DLM_OK) {
    dlm_denoiser denoiser = *dlm_bundle_describe(bundle)->denoiser;
    mock::Shape shape = {{},
                         denoiser.vocab_size,
                         denoiser.mask_token_id,
                         denoiser.top_k,
                         static_cast<int32_t>(denoiser.conditioning_size)};
    std::istringstream layers(options["layers"]);
    for (std::string layer; std::getline(layers, layer, ',');) {
      int32_t kv_heads = 0, head_size = 0;
      std::sscanf(layer.c_str(), "%dx%d", &kv_heads, &head_size);
      shape.layers.push_back({kv_heads, head_size * denoiser.kv_element_bytes});
    }
    if (shape.layers.empty())
      shape.layers.assign(static_cast<size_t>(denoiser.layers),
                          {denoiser.kv_heads, denoiser.head_size * denoiser.kv_element_bytes});
    denoiser.kv_heads = 1, denoiser.head_size = widest(shape) / denoiser.kv_element_bytes;
    if (dlm_bundle_from_callback(&denoiser, run_pass, &shape, message, sizeof message, &callback) !=
        DLM_OK)
      return 1;
    const auto threads = static_cast<size_t>(number("threads"));
    std::vector<std::unique_ptr<Session>> sessions;
    for (size_t i = 0; i < threads; ++i) sessions.push_back(std::make_unique<Session>(bundle));
    for (int round = 0; round < number("rounds"); ++round) {
      std::vector<Answer> answers(threads);
      std::vector<std::thread> workers;
      for (size_t i = 0; i < threads; ++i)
        if (sessions[i]->status == DLM_OK)
          workers.emplace_back([&, i] {
            answers[i] = ask(sessions[i]->handle, denoiser, static_cast<int>(i), round);
          });
      for (std::thread& worker : workers) worker.join();
      for (size_t i = 0; i < threads; ++i) {
        if (sessions[i]->status != DLM_OK) {
          std::printf("round %s %s\n", dlm_status_name(sessions[i]->status), sessions[i]->message);
          continue;
        }
        const Answer &ours = answers[i],
                     theirs = ask(Session(callback).handle, denoiser, static_cast<int>(i), round);
        const bool is_same = ours.canvas == theirs.canvas && ours.logits == theirs.logits &&
                             ours.stats.nfe == theirs.stats.nfe && theirs.status == DLM_OK;
        std::printf("round %s %s\n", dlm_status_name(ours.status),
                    ours.status != DLM_OK ? ours.message.c_str()
                    : is_same             ? "same"
                                          : "different");
      }
      std::printf("counts nfe=%d cache_bytes=%d %s\n", answers[0].stats.nfe,
                  static_cast<int>(answers[0].stats.cache_bytes), mock::counts().c_str());
    }
  }
  dlm_bundle_destroy(callback);
  dlm_bundle_destroy(bundle);
  std::printf("live %d\n", mock::live());
  return 0;
}
