/* Tests the C ABI of libdlm_runtime from C99: calls that the library must reject, errors that it
 * must survive, and requests with a fake denoiser.
 *
 * Usage: native_driver BUNDLE. tests/test_native.py runs it under AddressSanitizer and
 * UndefinedBehaviorSanitizer. $DLM_ONNXRUNTIME is the path of ONNX Runtime. Prints a line for each
 * failed check, then "N passed, N failed". */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dlm_runtime.h"

static int passed, failed;

static int claim(int holds, const char* text, int line) {
  ++*(holds ? &passed : &failed);
  if (!holds) printf("native_driver.c:%d: not so: %s\n", line, text);
  return holds;
}
#define CLAIM(condition) claim((condition) != 0, #condition, __LINE__)

/* Checks the status. If it is wrong, also prints the message of the session. */
static int has_status(dlm_status found, dlm_status wanted, const dlm_session* session, int line) {
  const char* sentence = session == NULL ? "" : dlm_session_last_error(session);
  ++*(found == wanted ? &passed : &failed);
  if (found != wanted) {
    printf("native_driver.c:%d: %s instead of %s: %s\n", line, dlm_status_name(found),
           dlm_status_name(wanted), sentence);
  }
  if (session != NULL)
    claim((found == DLM_OK) == (sentence[0] == '\0'), "a sentence exactly on failure", line);
  return found == wanted;
}
#define STATUS(call, wanted) has_status((call), (wanted), NULL, __LINE__)
#define SESSION_STATUS(call, wanted) has_status((call), (wanted), session, __LINE__)

static void* const garbage = (void*)(intptr_t)-1; /* the value of out-pointers before a call */

/* ---- A made-up denoiser ---- */

enum {
  V = 50,
  MASK = 49,
  EOS = 48,
  LAYERS = 2,
  HEADS = 2,
  HEAD_SIZE = 4,
  LONGEST = 64,
  NOWHERE = -1000,
  MOST = 5
};

typedef struct {
  int32_t shift, element_bytes, eos_at; /* eos_at: a position that predicts EOS, or NOWHERE */
  int32_t bad_at; /* the pass, counted from 0, in which the last row of the last request is wrong;
                     -1: no pass */
  dlm_status bad_status;
  int is_token_bad, is_prob_bad, is_entropy_bad;
  int32_t bad_token;
  float bad_value;
  dlm_session* re_entered;
  int32_t passes, broken_promises;
  int32_t written[LONGEST]; /* for each position, the last pass (counted from 1) that wrote its keys
                               and values */
  int32_t last[4]; /* number of requests, tokens, cached tokens and rows of the last pass */
  int32_t batches[MOST + 1]; /* numbers of passes, by their number of requests */
} fake;

static fake make_fake(void) {
  fake f;
  memset(&f, 0, sizeof f);
  f.element_bytes = 4;
  f.eos_at = NOWHERE;
  f.bad_at = -1;
  return f;
}

static int32_t token_at(const fake* f, int64_t position) {
  return position == f->eos_at ? EOS : (int32_t)(position * 7 % 47);
}

/* The first byte of a row is its position. The other bytes depend on everything that identifies the
 * row, including the pass that wrote it. */
static uint8_t cache_byte(const fake* f, int32_t layer, int is_value, int32_t head,
                          int64_t position, size_t byte) {
  if (byte == 0) return (uint8_t)position;
  return (uint8_t)(131 * layer + 17 * is_value + 59 * head + 7 * (int32_t)position + (int32_t)byte +
                   29 * f->written[position]);
}

/* Writes the rows of all heads of all requests of the pass. */
static void write_rows(const fake* f, int32_t layer, int is_value, const dlm_pass* p, uint8_t* to) {
  const size_t row_bytes = (size_t)HEAD_SIZE * (size_t)f->element_bytes;
  for (int32_t head = 0; head < p->batch * HEADS; ++head)
    for (int32_t row = 0; row < p->tokens; ++row)
      for (size_t byte = 0; byte < row_bytes; ++byte)
        *to++ = cache_byte(f, layer, is_value, head, p->position_ids[row], byte);
}

/* Returns 1 if the cached rows are wrong. There must be one row for each position outside the pass,
 * with the values that were last written for this position. */
static int is_cache_wrong(const fake* f, int32_t layer, int is_value, const dlm_pass* p,
                          const uint8_t* from) {
  const size_t row_bytes = (size_t)HEAD_SIZE * (size_t)f->element_bytes;
  const int32_t first = (int32_t)p->position_ids[0], length = p->cached + p->tokens;
  for (int32_t head = 0; head < p->batch * HEADS; ++head) {
    int is_seen[LONGEST] = {0};
    for (int32_t row = 0; row < p->cached; ++row, from += row_bytes) {
      const int32_t position = from[0];
      if (position >= length || (position >= first && position < first + p->tokens) ||
          is_seen[position]++)
        return 1;
      for (size_t byte = 0; byte < row_bytes; ++byte)
        if (from[byte] != cache_byte(f, layer, is_value, head, position, byte)) return 1;
    }
  }
  return 0;
}

/* Checks a pass against the promises of dlm_runtime.h. Returns the number of broken promises. */
static int32_t broken_promises(const fake* f, const dlm_pass* p) {
  int32_t broken = p->batch < 1 || p->batch > MOST || p->tokens < 1 || p->rows < 1 ||
                   p->cached < 0 || p->layers != LAYERS;
  broken += p->tokens + p->cached > LONGEST || p->top_tokens == NULL || p->top_probs == NULL;
  if (broken) return broken;
  for (int32_t i = 0; i < p->batch * p->tokens; ++i) {
    broken += p->input_ids[i] < 0 || p->input_ids[i] >= V ||
              p->position_ids[i] != p->position_ids[0] + i % p->tokens;
  }
  for (int32_t i = 0; i < p->batch * p->rows; ++i)
    broken += p->score_rows[i] < 0 || p->score_rows[i] >= p->tokens;
  for (int32_t layer = 0; p->cached > 0 && layer < LAYERS; ++layer) {
    const void* const both[] = {p->past_keys[layer], p->past_values[layer]};
    for (int is_value = 0; is_value < 2; ++is_value)
      broken += both[is_value] == NULL || is_cache_wrong(f, layer, is_value, p, both[is_value]);
  }
  return broken;
}

static dlm_status run(void* user, const dlm_pass* p) {
  fake* f = user;
  const int is_bad = f->passes++ == f->bad_at;
  f->last[0] = p->batch, f->last[1] = p->tokens, f->last[2] = p->cached, f->last[3] = p->rows;
  f->broken_promises += broken_promises(f, p);
  if (p->batch >= 1 && p->batch <= MOST) ++f->batches[p->batch];
  if (p->present_keys != NULL && p->present_values != NULL) {
    for (int32_t i = 0; i < p->tokens; ++i) f->written[p->position_ids[i]] = f->passes;
    for (int32_t layer = 0; layer < LAYERS; ++layer) {
      write_rows(f, layer, 0, p, p->present_keys[layer]);
      write_rows(f, layer, 1, p, p->present_values[layer]);
    }
  }
  if (f->re_entered != NULL) {
    const dlm_step* step;
    if (dlm_session_step(f->re_entered, &step) != DLM_INVALID_ARGUMENT) ++f->broken_promises;
  }
  for (int32_t i = 0; i < p->batch * p->rows; ++i) {
    const int64_t row = p->score_rows[i];
    if (row < 0 || row >= p->tokens) continue; /* this error was counted above */
    const int64_t position = p->position_ids[row];
    /* With shift 1, row 0 is scored for position 0 and for position 1. If position 0 has the mask
     * token, this row predicts position 0 here. */
    const int is_first = position == 0 && p->input_ids[i / p->rows * p->tokens + row] == MASK;
    const int64_t predicted = position + (f->shift == 1 && !is_first ? 1 : 0);
    const int is_bad_row = is_bad && i == p->batch * p->rows - 1;
    p->top_tokens[2 * i] = is_bad_row && f->is_token_bad ? f->bad_token : token_at(f, predicted);
    p->top_tokens[2 * i + 1] = 47;
    p->top_probs[2 * i] = 0.9f - 0.001f * (float)(predicted % 13);
    p->top_probs[2 * i + 1] = 0.05f;
    if (is_bad_row && f->is_prob_bad) p->top_probs[2 * i] = f->bad_value;
    if (p->entropy != NULL)
      p->entropy[i] =
          is_bad_row && f->is_entropy_bad ? f->bad_value : -0.01f * (float)(predicted % 13);
    if (p->logits != NULL)
      for (int32_t v = 0; v < V; ++v) p->logits[i * V + v] = (float)(1000 * position + v);
  }
  return is_bad ? f->bad_status : DLM_OK;
}

static dlm_denoiser describe(const fake* f) {
  static const int32_t eos = EOS;
  dlm_denoiser d;
  dlm_denoiser_init(&d, sizeof d);
  d.vocab_size = V;
  d.mask_token_id = MASK;
  d.max_canvas_length = LONGEST;
  d.layers = LAYERS;
  d.kv_heads = HEADS;
  d.head_size = HEAD_SIZE;
  d.kv_element_bytes = f->element_bytes;
  d.shift = f->shift;
  d.has_cache = 1;
  d.eos_token_ids = &eos;
  d.eos_count = 1;
  return d;
}

static dlm_bundle* open_fake(fake* f) {
  dlm_bundle* bundle = NULL;
  const dlm_denoiser d = describe(f);
  STATUS(dlm_bundle_from_callback(&d, run, f, NULL, 0, &bundle), DLM_OK);
  return bundle;
}

static dlm_session* open_session(dlm_bundle* bundle) {
  dlm_session* session = NULL;
  STATUS(dlm_session_create(bundle, NULL, 0, &session), DLM_OK);
  return session;
}

/* Options with a policy that the caller may still change. */
static dlm_request options_of(dlm_policy* policy, int32_t new_tokens) {
  dlm_request options;
  dlm_policy_init(policy, sizeof *policy);
  dlm_request_init(&options, sizeof options);
  policy->block_length = 8;
  options.policy = policy;
  options.max_new_tokens = new_tokens;
  return options;
}

static const int32_t prompt[] = {1, 2, 3};

/* Returns a copy of the options with these given tokens. */
static dlm_request of(const dlm_request* options, const int32_t* tokens, size_t count) {
  dlm_request request = *options;
  request.tokens = count > 0 ? tokens : NULL;
  request.token_count = count;
  return request;
}

/* Runs a request with these tokens. If the request does not fail, copies its canvas to `tokens`. */
static dlm_status generate(dlm_session* session, const dlm_request* options, int32_t* tokens,
                           size_t count, dlm_stats* stats, size_t* length) {
  dlm_request request;
  const dlm_result* result = garbage;
  if (options != NULL) request = of(options, tokens, count);
  const dlm_status status =
      dlm_session_generate(session, options == NULL ? NULL : &request, &result);
  *length = 0;
  if (stats != NULL) memset(stats, 0, sizeof *stats);
  if (result != NULL)
    claim(result->status == status && result->stats->nfe >= 0, "a result says how the call ended",
          __LINE__);
  if (status != DLM_OK) return status;
  *length = result->length;
  memcpy(tokens, result->tokens, result->length * sizeof *tokens);
  if (stats != NULL) *stats = *result->stats;
  return status;
}

static dlm_status start(dlm_session* session, const dlm_request* options, const int32_t* tokens,
                        size_t count) {
  dlm_request request;
  if (options != NULL) request = of(options, tokens, count);
  return dlm_session_start(session, options == NULL ? NULL : &request);
}

/* Returns 1 if the step has no text, and exactly its undecided positions have the mask token. */
static int is_told_undecided(const dlm_step* step) {
  for (int32_t i = 0; step->done == 0 && i < step->length; ++i)
    if (step->undecided[i] != (step->canvas[i] == MASK)) return 0;
  return step->struct_size == sizeof *step && step->text_size == 0 && step->text[0] == '\0';
}

/* Checks that the session still works: runs a valid request, and compares its tokens with those
 * that the denoiser predicts. */
static void is_usable(dlm_session* session, const fake* f, int line) {
  dlm_policy policy;
  const dlm_request options = options_of(&policy, 9);
  int32_t tokens[12] = {1, 2, 3};
  size_t length = 0;
  int wrong = 0;
  has_status(generate(session, &options, tokens, 3, NULL, &length), DLM_OK, session, line);
  claim(length == 12 && memcmp(tokens, prompt, sizeof prompt) == 0, "the given tokens stay", line);
  for (int32_t i = 3; i < 12; ++i) wrong += tokens[i] != token_at(f, i);
  claim(wrong == 0, "every position holds its prediction", line);
  claim(f->broken_promises == 0, "passes are as the header says", line);
}

/* ---- Calls without a bundle ---- */

static void test_static_functions(void) {
  CLAIM(dlm_abi_version() == DLM_ABI_VERSION);
  CLAIM(strchr(dlm_version(), '.') != NULL);
  for (dlm_status status = -3; status < 20; ++status) CLAIM(dlm_status_name(status)[0] != '\0');
  CLAIM(strcmp(dlm_status_name(DLM_CANCELLED), "CANCELLED") == 0);
  dlm_bundle_destroy(NULL);
  dlm_session_destroy(NULL);
  dlm_denoiser_init(NULL, 8);
  dlm_policy_init(NULL, 8);
  dlm_open_options_init(NULL, 8);
  dlm_request_init(NULL, 8);
  CLAIM(dlm_bundle_describe(NULL) == NULL);
  CLAIM(dlm_session_last_error(NULL)[0] != '\0');
  dlm_policy small;
  memset(&small, 0x55, sizeof small);
  dlm_policy_init(&small, 16);
  CLAIM(small.struct_size == 16 &&
        ((const unsigned char*)&small)[16] == 0x55); /* no byte after the given size was written */
  unsigned char wide[sizeof(dlm_policy) + 8];
  memset(wide, 0x55, sizeof wide);
  dlm_policy_init((dlm_policy*)(void*)wide, sizeof wide);
  CLAIM(wide[sizeof wide - 1] == 0); /* a field that the library does not know is 0 */
}

static void refuse_open(const char* path, const dlm_open_options* options, dlm_status wanted,
                        int line) {
  char message[200] = "";
  dlm_bundle* bundle = garbage;
  has_status(dlm_bundle_open(path, options, message, sizeof message, &bundle), wanted, NULL, line);
  claim(bundle == NULL && message[0] != '\0', "no bundle, but a sentence", line);
}

static void test_open_refuses(const char* path) {
  dlm_open_options options;
  char message[200] = "";
  CLAIM(dlm_bundle_open(path, NULL, message, sizeof message, NULL) == DLM_INVALID_ARGUMENT &&
        message[0] != '\0');
  CLAIM(dlm_bundle_open(NULL, NULL, NULL, 0, NULL) == DLM_INVALID_ARGUMENT);
  refuse_open(NULL, NULL, DLM_INVALID_ARGUMENT, __LINE__);
  refuse_open("", NULL, DLM_NOT_FOUND, __LINE__);
  refuse_open("/no/such/bundle", NULL, DLM_NOT_FOUND, __LINE__);
  refuse_open("/", NULL, DLM_NOT_FOUND, __LINE__);
  refuse_open("/dev/null", NULL, DLM_NOT_FOUND, __LINE__);
  dlm_open_options_init(&options, sizeof options);
  --options.struct_size;
  refuse_open(path, &options, DLM_INVALID_ARGUMENT, __LINE__);
  dlm_open_options_init(&options, sizeof options);
  options.engine = NULL;
  refuse_open(path, &options, DLM_UNSUPPORTED, __LINE__);
  options.engine = "abacus";
  refuse_open(path, &options, DLM_UNSUPPORTED, __LINE__);
  dlm_open_options_init(&options, sizeof options);
  options.threads = -1;
  refuse_open(path, &options, DLM_INVALID_ARGUMENT, __LINE__);
  dlm_open_options_init(&options, sizeof options);
  options.engine_library = "/no/such/libonnxruntime.so";
  refuse_open(path, &options, DLM_ENGINE_MISSING, __LINE__);
}

static void test_engines_by_name(const char* path) {
  dlm_open_options options;
  dlm_open_options_init(&options, sizeof options);
  CLAIM(strcmp(options.engine, "auto") == 0);
  dlm_bundle* bundle = NULL;
  options.engine = "none";
  options.engine_library = "/no/such/library"; /* no library is loaded */
  if (STATUS(dlm_bundle_open(path, &options, NULL, 0, &bundle), DLM_OK)) {
    dlm_session* session = open_session(bundle);
    dlm_policy policy;
    const dlm_request one = options_of(&policy, 1);
    int32_t tokens[4] = {1, 2, 3};
    float logits[V];
    size_t length = 99;
    const dlm_bundle_info* about = dlm_bundle_describe(bundle);
    CLAIM(strcmp(about->engine, "none") == 0 && about->manifest[0] == '{');
    SESSION_STATUS(generate(session, &one, tokens, 3, NULL, &length), DLM_UNSUPPORTED);
    CLAIM(length == 0 && strstr(dlm_session_last_error(session), "\"none\"") != NULL);
    SESSION_STATUS(dlm_session_logits(session, tokens, 3, tokens, 1, logits, 0),
                   DLM_INVALID_ARGUMENT);
    dlm_session_destroy(session);
  }
  dlm_bundle_destroy(bundle);
  /* TensorRT's headers, the driver, or an engine in the bundle is missing. The first error
   * must have a message. */
  char message[400] = "";
  dlm_open_options_init(&options, sizeof options);
  options.engine = "tensorrt";
  const dlm_status status = dlm_bundle_open(path, &options, message, sizeof message, &bundle);
  CLAIM((status == DLM_UNSUPPORTED || status == DLM_ENGINE_MISSING) && bundle == NULL &&
        strstr(message, "onnxruntime") != NULL);
}

static void test_messages_stay_inside_their_buffer(void) {
  char message[64];
  for (size_t capacity = 0; capacity < 40; ++capacity) {
    dlm_bundle* bundle = garbage;
    memset(message, 'x', sizeof message);
    CLAIM(dlm_bundle_open("/no/such/bundle", NULL, message, capacity, &bundle) == DLM_NOT_FOUND &&
          bundle == NULL);
    CLAIM(message[capacity] == 'x');
    if (capacity > 0) CLAIM(strlen(message) < capacity);
    if (capacity > 1) CLAIM(message[0] == '/');
  }
  CLAIM(dlm_bundle_open("/no/such/bundle", NULL, NULL, 64, NULL) == DLM_INVALID_ARGUMENT);
  dlm_session* session = garbage;
  CLAIM(dlm_session_create(NULL, NULL, 64, &session) == DLM_INVALID_ARGUMENT && session == NULL);
  memset(message, 'x', sizeof message);
  CLAIM(dlm_session_create(NULL, message, 1, &session) == DLM_INVALID_ARGUMENT &&
        memcmp(message, "\0xx", 3) == 0);
  CLAIM(dlm_session_create(NULL, NULL, 0, NULL) == DLM_INVALID_ARGUMENT);
}

static void refuse_denoiser(const dlm_denoiser* denoiser, dlm_pass_fn pass, int line) {
  char message[200] = "";
  dlm_bundle* bundle = garbage;
  const dlm_status status =
      dlm_bundle_from_callback(denoiser, pass, NULL, message, sizeof message, &bundle);
  has_status(status, DLM_INVALID_ARGUMENT, NULL, line);
  claim(bundle == NULL && message[0] != '\0', "no bundle, but a sentence", line);
}

static void test_denoisers_out_of_range_are_refused(void) {
  fake f = make_fake();
  const dlm_denoiser good = describe(&f);
  const int32_t wrong_ends[][1] = {{-1}, {V}, {MASK}};
  CLAIM(dlm_bundle_from_callback(&good, run, &f, NULL, 0, NULL) == DLM_INVALID_ARGUMENT);
  refuse_denoiser(NULL, run, __LINE__);
  refuse_denoiser(&good, NULL, __LINE__);
#define REFUSE(field, value)              \
  do {                                    \
    dlm_denoiser bad = good;              \
    bad.field = (value);                  \
    refuse_denoiser(&bad, run, __LINE__); \
  } while (0)
  REFUSE(struct_size, 0);
  REFUSE(struct_size, sizeof good + 8);
  REFUSE(vocab_size, 1);
  REFUSE(vocab_size, INT32_MIN);
  REFUSE(mask_token_id, -1);
  REFUSE(mask_token_id, V);
  REFUSE(max_canvas_length, 0);
  REFUSE(max_canvas_length, INT32_MAX);
  REFUSE(layers, 0);
  REFUSE(kv_heads, -1);
  REFUSE(head_size, 0);
  REFUSE(top_k, 1);
  REFUSE(top_k, 65);
  REFUSE(kv_element_bytes, 0);
  REFUSE(shift, 2);
  REFUSE(max_new_tokens, 0);
  REFUSE(eos_token_ids, NULL);
  REFUSE(eos_count, SIZE_MAX);
  REFUSE(eos_count, 0);
  for (size_t i = 0; i < 3; ++i) REFUSE(eos_token_ids, wrong_ends[i]);
#undef REFUSE
}

static void test_presets(const char* path) {
  char message[200] = "";
  dlm_policy policy, untouched;
  dlm_bundle* bundle = NULL;
  dlm_policy_init(&policy, sizeof policy);
  untouched = policy;
  if (STATUS(dlm_bundle_open(path, NULL, message, sizeof message, &bundle), DLM_OK)) {
    const dlm_bundle_info* about = dlm_bundle_describe(bundle);
    CLAIM(message[0] == '\0' && about->manifest[0] == '{' && strstr(about->engine, "onnxruntime"));
    CLAIM(dlm_bundle_policy(bundle, "no such", NULL, message, sizeof message, &policy) ==
          DLM_NOT_FOUND);
    CLAIM(strstr(message, "llada") != NULL && memcmp(&policy, &untouched, sizeof policy) == 0);
    CLAIM(dlm_bundle_policy(bundle, NULL, NULL, message, sizeof message, NULL) ==
          DLM_INVALID_ARGUMENT);
    CLAIM(dlm_bundle_policy(NULL, NULL, NULL, message, sizeof message, &policy) ==
          DLM_INVALID_ARGUMENT);
    policy.struct_size = 8;
    CLAIM(dlm_bundle_policy(bundle, NULL, NULL, message, sizeof message, &policy) ==
          DLM_INVALID_ARGUMENT);
    policy.struct_size = sizeof policy;
    CLAIM(dlm_bundle_policy(bundle, NULL, NULL, message, sizeof message, &policy) == DLM_OK &&
          message[0] == '\0');
    CLAIM(dlm_bundle_policy(bundle, "fast-dllm", NULL, NULL, 0, &policy) == DLM_OK &&
          strcmp(policy.cache, "dual") == 0);
    CLAIM(dlm_bundle_policy(bundle, NULL, "low", message, sizeof message, &policy) ==
          DLM_NOT_FOUND);
    CLAIM(strstr(message, "dlm-export effort") != NULL && strcmp(policy.cache, "dual") == 0);
  }
  dlm_bundle_destroy(bundle);
  fake f = make_fake();
  bundle = open_fake(&f);
  CLAIM(dlm_bundle_policy(bundle, NULL, NULL, message, sizeof message, &policy) == DLM_NOT_FOUND &&
        message[0] != '\0');
  const dlm_bundle_info* info = dlm_bundle_describe(bundle);
  CLAIM(info->struct_size == sizeof *info && info->manifest[0] == '\0');
  const dlm_denoiser* told = info->denoiser;
  CLAIM(told->struct_size == sizeof *told && told->vocab_size == V && told->eos_count == 1 &&
        told->eos_token_ids[0] == EOS);
  CLAIM(told->max_new_tokens == 128);
  dlm_bundle_destroy(bundle);
}

/* ---- Requests that are rejected ---- */

/* Checks that generate and start reject a request and change no outputs, and that the session still
 * works after that. */
static void refuse_request(dlm_session* session, const fake* f, const dlm_request* options,
                           const int32_t* given, size_t count, dlm_status wanted, int line) {
  int32_t tokens[LONGEST];
  dlm_stats stats;
  size_t length = 99;
  memset(&stats, 0x55, sizeof stats);
  for (size_t i = 0; i < LONGEST; ++i) tokens[i] = 7; /* valid ids */
  if (given != NULL && count <= LONGEST) memcpy(tokens, given, count * sizeof *given);
  has_status(generate(session, options, tokens, count, &stats, &length), wanted, session, line);
  claim(length == 0, "length is 0 on failure", line);
  claim(stats.nfe == 0 && stats.total_s == 0 && stats.cache_bytes == 0, "stats are 0 on failure",
        line);
  if (given != NULL && count <= LONGEST)
    claim(memcmp(tokens, given, count * sizeof *given) == 0, "given ids stay", line);
  for (size_t i = given != NULL && count <= LONGEST ? count : 0; i < LONGEST; ++i) {
    if (tokens[i] != 7) claim(0, "tokens are untouched", line);
  }
  has_status(start(session, options, tokens, count), wanted, session, line);
  const dlm_step* step = garbage;
  has_status(dlm_session_step(session, &step), DLM_INVALID_ARGUMENT, session, line);
  claim(step == NULL, "step is NULL on failure", line);
  is_usable(session, f, line);
}

static void test_wrong_requests_are_refused(void) {
  fake f = make_fake();
  dlm_bundle* bundle = open_fake(&f);
  dlm_session* session = open_session(bundle);
  dlm_policy policy;
  dlm_request good = options_of(&policy, 8);
  int32_t tokens[LONGEST] = {1, 2, 3};
  size_t length = 99;
  CLAIM(generate(NULL, &good, tokens, 3, NULL, &length) == DLM_INVALID_ARGUMENT && length == 0);
  SESSION_STATUS(generate(session, &good, NULL, 3, NULL, &length), DLM_INVALID_ARGUMENT);
  const dlm_step* step = NULL;
  SESSION_STATUS(dlm_session_step(session, &step),
                 DLM_INVALID_ARGUMENT); /* no request was left running */
  CLAIM(f.passes == 0);
  dlm_request plain = of(&good, tokens, 3);
  SESSION_STATUS(dlm_session_generate(session, &plain, NULL), DLM_OK);
  plain.prompt = "a"; /* a prompt and tokens must not be passed together */
  SESSION_STATUS(dlm_session_generate(session, &plain, NULL), DLM_INVALID_ARGUMENT);
  plain.tokens = NULL, plain.token_count = 0, plain.prompt_size = 1; /* this bundle has no text */
  SESSION_STATUS(dlm_session_generate(session, &plain, NULL), DLM_UNSUPPORTED);
  CLAIM(start(NULL, &good, tokens, 3) == DLM_INVALID_ARGUMENT);
  SESSION_STATUS(start(session, &good, NULL, 3), DLM_INVALID_ARGUMENT);

  const int32_t outside[] = {1, -1, V, INT32_MAX, INT32_MIN};
  for (size_t i = 1; i < sizeof outside / sizeof *outside; ++i) {
    const int32_t given[] = {1, 2, outside[i]};
    refuse_request(session, &f, &good, given, 3, DLM_INVALID_ARGUMENT, __LINE__);
  }
#define REFUSE_OPTIONS(field, value)                                              \
  do {                                                                            \
    dlm_request bad = good;                                                       \
    bad.field = (value);                                                          \
    refuse_request(session, &f, &bad, prompt, 3, DLM_INVALID_ARGUMENT, __LINE__); \
  } while (0)
  REFUSE_OPTIONS(struct_size, 0);
  REFUSE_OPTIONS(struct_size, sizeof good - 1);
  REFUSE_OPTIONS(max_new_tokens, -2);
  REFUSE_OPTIONS(max_new_tokens, INT32_MIN);
  REFUSE_OPTIONS(new_tokens, -1);
  REFUSE_OPTIONS(new_tokens, INT64_MAX);
  REFUSE_OPTIONS(new_tokens, 1); /* good also has max_new_tokens */
  dlm_request beyond = good;
  beyond.max_new_tokens = DLM_DEFAULT_NEW_TOKENS, beyond.new_tokens = LONGEST - 2;
  refuse_request(session, &f, &beyond, prompt, 3, DLM_INVALID_ARGUMENT, __LINE__);
  REFUSE_OPTIONS(steps, -1);
  REFUSE_OPTIONS(max_steps, -1);
  REFUSE_OPTIONS(top_log_probs, -1);
  REFUSE_OPTIONS(top_log_probs, 21);
  REFUSE_OPTIONS(constrained_tokens, -1);
  REFUSE_OPTIONS(deadline_ms, (double)NAN);
  REFUSE_OPTIONS(text, DLM_TEXT_STEPS + 1); /* a value that only a newer library knows */
  REFUSE_OPTIONS(text, -1);
  REFUSE_OPTIONS(stop_count, 1); /* the strings are missing */
  refuse_request(session, &f, NULL, prompt, 3, DLM_INVALID_ARGUMENT, __LINE__);
  refuse_request(session, &f, &good, NULL, LONGEST + 1, DLM_INVALID_ARGUMENT, __LINE__);
  refuse_request(session, &f, &good, NULL, SIZE_MAX, DLM_INVALID_ARGUMENT, __LINE__);
  dlm_request most = of(&good, prompt, 3);
  most.max_new_tokens = INT32_MAX; /* this is only a limit, so the longest canvas lowers it */
  const dlm_result* filled = NULL;
  SESSION_STATUS(dlm_session_generate(session, &most, &filled), DLM_OK);
  CLAIM(filled != NULL && filled->length <= LONGEST);
  dlm_request none = good;
  none.max_new_tokens = 0;
  refuse_request(session, &f, &none, NULL, 0, DLM_INVALID_ARGUMENT, __LINE__); /* an empty canvas */
  dlm_request hasty = good;
  hasty.max_new_tokens = 24;
  hasty.steps = 2; /* there are three blocks */
  refuse_request(session, &f, &hasty, prompt, 3, DLM_INVALID_ARGUMENT, __LINE__);

#define REFUSE_POLICY(field, value, wanted)                          \
  do {                                                               \
    good = options_of(&policy, 8);                                   \
    policy.field = (value);                                          \
    refuse_request(session, &f, &good, prompt, 3, wanted, __LINE__); \
  } while (0)
  /* test_loop.py tests the values of each field. */
  REFUSE_POLICY(cache, NULL, DLM_INVALID_ARGUMENT);
  REFUSE_POLICY(cache, "no such", DLM_INVALID_ARGUMENT);
  REFUSE_POLICY(struct_size, 0, DLM_INVALID_ARGUMENT);
  REFUSE_POLICY(block_length, INT32_MAX, DLM_INVALID_ARGUMENT);
  REFUSE_POLICY(threshold, (double)NAN, DLM_INVALID_ARGUMENT);
  good = options_of(&policy, 8);
  policy.commit = "threshold";
  policy.score = "entropy";
  refuse_request(session, &f, &good, prompt, 3, DLM_INVALID_ARGUMENT, __LINE__);
  dlm_session_destroy(session);
  dlm_bundle_destroy(bundle);

  dlm_denoiser cacheless = describe(&f);
  cacheless.has_cache = 0;
  bundle = NULL;
  STATUS(dlm_bundle_from_callback(&cacheless, run, &f, NULL, 0, &bundle), DLM_OK);
  session = open_session(bundle);
  REFUSE_POLICY(cache, "dual", DLM_UNSUPPORTED);
  REFUSE_POLICY(cache, "prefix", DLM_UNSUPPORTED);
  dlm_session_destroy(session);
  dlm_bundle_destroy(bundle);
}

static void test_wrong_logits_requests_are_refused(void) {
  fake f = make_fake();
  dlm_bundle* bundle = open_fake(&f);
  dlm_session* session = open_session(bundle);
  float logits[3 * V];
  const int32_t rows[] = {2, 0, 2}, given[] = {1, MASK, 3}, outside[] = {1, V, 3};
  const int32_t wrong_rows[][1] = {{-1}, {3}, {INT32_MAX}, {INT32_MIN}};
#define REFUSE(...) SESSION_STATUS(dlm_session_logits(session, __VA_ARGS__), DLM_INVALID_ARGUMENT)
  CLAIM(dlm_session_logits(NULL, given, 3, rows, 3, logits, 3 * V) == DLM_INVALID_ARGUMENT);
  REFUSE(NULL, 3, rows, 3, logits, 3 * V);
  REFUSE(NULL, 0, rows, 3, logits, 3 * V);
  REFUSE(given, 0, rows, 1, logits, 3 * V);
  REFUSE(given, 3, NULL, 3, logits, 3 * V);
  REFUSE(given, 3, rows, 3, NULL, 3 * V);
  REFUSE(given, 3, rows, 0, logits, 3 * V);
  REFUSE(given, 3, rows, 4, logits, SIZE_MAX);
  REFUSE(given, 3, rows, SIZE_MAX, logits, SIZE_MAX);
  REFUSE(given, 3, rows, 3, logits, 3 * V - 1);
  REFUSE(outside, 3, rows, 3, logits, 3 * V);
  REFUSE(given, LONGEST + 1, rows, 3, logits, 3 * V);
  REFUSE(given, SIZE_MAX, rows, 3, logits, 3 * V);
  for (size_t i = 0; i < 4; ++i) REFUSE(given, 3, wrong_rows[i], 1, logits, 3 * V);
#undef REFUSE
  CLAIM(f.passes == 0);
  SESSION_STATUS(dlm_session_logits(session, given, 3, rows, 3, logits, 3 * V), DLM_OK);
  CLAIM(logits[0] == 2000 && logits[V + 1] == 1 && logits[3 * V - 1] == 2000 + V - 1 &&
        f.broken_promises == 0);
  f.bad_at = f.passes;
  f.bad_status = DLM_ENGINE_FAILED;
  SESSION_STATUS(dlm_session_logits(session, given, 3, rows, 3, logits, 3 * V), DLM_ENGINE_FAILED);
  dlm_policy policy;
  const dlm_request options = options_of(&policy, 8);
  const dlm_step* step;
  SESSION_STATUS(start(session, &options, prompt, 3), DLM_OK);
  SESSION_STATUS(dlm_session_logits(session, given, 3, rows, 1, logits, V), DLM_OK);
  SESSION_STATUS(dlm_session_step(session, &step),
                 DLM_INVALID_ARGUMENT); /* the call of logits ended the running request */
  is_usable(session, &f, __LINE__);
  dlm_session_destroy(session);
  dlm_bundle_destroy(bundle);
}

/* ---- Steps and callbacks ---- */

static void test_steps(void) {
  fake f = make_fake();
  dlm_bundle* bundle = open_fake(&f);
  dlm_session* session = open_session(bundle);
  dlm_policy policy;
  const dlm_request options = options_of(&policy, 10);
  const dlm_step* step = garbage;
  const dlm_result* result = garbage;
  CLAIM(dlm_session_step(NULL, &step) == DLM_INVALID_ARGUMENT && step == NULL);
  step = garbage;
  SESSION_STATUS(dlm_session_step(session, &step),
                 DLM_INVALID_ARGUMENT); /* no request was started */
  CLAIM(step == NULL);
  SESSION_STATUS(start(session, &options, prompt, 3), DLM_OK);
  SESSION_STATUS(dlm_session_step(session, NULL), DLM_INVALID_ARGUMENT);
  SESSION_STATUS(dlm_session_step(session, &step), DLM_OK);
  SESSION_STATUS(start(session, &options, prompt, 3), DLM_OK); /* ends the running request */
  int32_t steps = 0, committed = 0;
  do {
    if (!SESSION_STATUS(dlm_session_step(session, &step), DLM_OK)) break;
    ++steps;
    committed += step->committed;
    CLAIM(is_told_undecided(step));
    CLAIM(step->nfe == steps && step->length == 13 && step->block_start < step->block_end &&
          step->block_end <= 13);
    for (int32_t i = 0; i < step->length; ++i) {
      const int is_scored =
          step->canvas[i] == MASK && i >= step->block_start && i < step->block_end;
      CLAIM(is_scored ? step->guess[i] == token_at(&f, i) && step->score[i] > 0
                      : step->guess[i] == -1 && step->score[i] == 0);
    }
  } while (!step->done);
  SESSION_STATUS(dlm_session_result(session, 0, &result), DLM_OK);
  CLAIM(steps == 10 && committed == 10 && result->stats->nfe == 10 && f.passes == 11);
  CLAIM(result->stats->total_s >= result->stats->passes_s);
  SESSION_STATUS(dlm_session_step(session, &step),
                 DLM_OK); /* the request is done, so no pass is made */
  CLAIM(step->done == 1 && step->nfe == 10 && f.passes == 11 && f.broken_promises == 0);
  is_usable(session, &f, __LINE__);
  dlm_session_destroy(session);
  dlm_bundle_destroy(bundle);
}

typedef struct {
  int32_t calls, stop_at;
  dlm_session* re_entered; /* the session that is generating, or NULL */
  dlm_status answers[6];
} watcher;

static int32_t watch(void* user, const dlm_step* step) {
  watcher* w = user;
  ++w->calls;
  if (w->re_entered != NULL) {
    dlm_policy policy;
    const dlm_request options = options_of(&policy, 8), *const requests[] = {&options};
    float logits[V];
    const dlm_step* other;
    const int32_t row = 0;
    w->answers[0] = dlm_session_step(w->re_entered, &other);
    w->answers[1] = start(w->re_entered, &options, NULL, 0);
    w->answers[2] = dlm_session_logits(w->re_entered, prompt, 1, &row, 1, logits, V);
    w->answers[3] = dlm_session_generate(w->re_entered, &options, NULL);
    w->answers[4] = dlm_session_time_passes(w->re_entered, 1, 4, 0, 4, NULL, 0);
    w->answers[5] = dlm_session_generate_batch(w->re_entered, requests, 1, 1);
  }
  CLAIM(is_told_undecided(step));
  CLAIM(step->nfe == w->calls && step->canvas != NULL && step->length > 0);
  return w->calls == w->stop_at ? -5 : 0;
}

static void test_step_callbacks(void) {
  fake f = make_fake();
  dlm_bundle* bundle = open_fake(&f);
  dlm_session* session = open_session(bundle);
  dlm_policy policy;
  dlm_request options = options_of(&policy, 8);
  const dlm_step* step;
  int32_t tokens[11] = {1, 2, 3};
  size_t length = 99;
  options.on_step = watch;
  for (int32_t stop_at = 1; stop_at <= 8;
       ++stop_at) { /* in the last call, all positions are decided */
    watcher w = {0, stop_at, NULL, {0}};
    options.user = &w;
    SESSION_STATUS(generate(session, &options, tokens, 3, NULL, &length), DLM_CANCELLED);
    CLAIM(w.calls == stop_at && length == 0 && tokens[0] == 1 && tokens[3] == 0);
    SESSION_STATUS(dlm_session_step(session, &step), DLM_CANCELLED);
    is_usable(session, &f, __LINE__);
  }
  watcher patient = {0, 0, NULL, {0}};
  options.user = &patient;
  SESSION_STATUS(generate(session, &options, tokens, 3, NULL, &length), DLM_OK);
  CLAIM(patient.calls == 8 && length == 11);
  /* Calls on the session from within its callbacks are rejected, and the request goes on. */
  watcher meddler = {0, 0, session, {0}};
  options.user = &meddler;
  SESSION_STATUS(generate(session, &options, tokens, 3, NULL, &length), DLM_OK);
  for (size_t i = 0; i < 6; ++i) CLAIM(meddler.answers[i] == DLM_INVALID_ARGUMENT);
  CLAIM(meddler.calls == 8 && length == 11);
  f.re_entered = session;
  is_usable(session, &f, __LINE__);
  dlm_session_destroy(session);
  dlm_bundle_destroy(bundle);
}

typedef struct {
  int32_t calls, stop_at;
  dlm_session* session;
  dlm_status answer; /* status of a call that the callback makes on the session */
} asker;

static int32_t ask(void* user) {
  asker* a = user;
  a->answer = dlm_session_before_pass(a->session, NULL, NULL);
  return ++a->calls == a->stop_at;
}

static void test_every_call_asks_before_each_of_its_passes(void) {
  fake f = make_fake();
  dlm_bundle* bundle = open_fake(&f);
  dlm_session* session = open_session(bundle);
  dlm_policy policy;
  const dlm_request options = options_of(&policy, 8);
  const int32_t passes[] = {8, 8, 1, 4, 5}; /* numbers of passes of the calls below */
  for (int32_t call = 0; call < 5; ++call) {
    for (int32_t stop_at = 0; stop_at <= passes[call]; ++stop_at) { /* 0: never */
      asker a = {0, stop_at, session, DLM_OK};
      const dlm_status wanted = stop_at > 0 ? DLM_CANCELLED : DLM_OK;
      const int32_t before = f.passes, row = 0;
      int32_t canvas[2][11] = {{1, 2, 3}, {3, 2, 1}};
      const dlm_request one = of(&options, canvas[0], 3),
                        two = of(&options, canvas[1], 3), *const both[] = {&one, &two};
      float logits[V];
      double seconds[4];
      size_t length;
      const dlm_step* step;
      CLAIM(dlm_session_before_pass(session, ask, &a) == DLM_OK);
      if (call == 0)
        SESSION_STATUS(generate(session, &options, canvas[0], 3, NULL, &length), wanted);
      if (call == 1) SESSION_STATUS(dlm_session_generate_batch(session, both, 2, 2), wanted);
      if (call == 2)
        SESSION_STATUS(dlm_session_logits(session, prompt, 3, &row, 1, logits, V), wanted);
      if (call == 3) {
        SESSION_STATUS(start(session, &options, prompt, 3), DLM_OK);
        while (a.calls < 4 && dlm_session_step(session, &step) == DLM_OK) continue;
        SESSION_STATUS(dlm_session_step(session, &step),
                       stop_at > 0 ? DLM_INVALID_ARGUMENT : DLM_OK); /* the request was ended */
        if (stop_at == 0) --a.calls, --f.passes; /* the step call above does not count */
      }
      if (call == 4)
        SESSION_STATUS(dlm_session_time_passes(session, 1, 4, 4, 1, seconds, 4), wanted);
      CLAIM(a.answer == DLM_INVALID_ARGUMENT); /* a callback must not use its session */
      CLAIM(a.calls == (stop_at > 0 ? stop_at : passes[call]) &&
            f.passes - before == a.calls - (stop_at > 0));
      is_usable(session, &f, __LINE__);
      CLAIM(dlm_session_before_pass(session, NULL, NULL) == DLM_OK);
      const int32_t asked = a.calls;
      is_usable(session, &f, __LINE__);
      CLAIM(a.calls == asked);
    }
  }
  CLAIM(dlm_session_before_pass(NULL, ask, NULL) == DLM_INVALID_ARGUMENT);
  dlm_session_destroy(session);
  dlm_bundle_destroy(bundle);
}

static void test_failing_passes_end_the_request(void) {
  fake f = make_fake();
  dlm_bundle* bundle = open_fake(&f);
  dlm_session* session = open_session(bundle);
  const dlm_status statuses[] = {DLM_ENGINE_FAILED, DLM_CANCELLED, DLM_OUT_OF_MEMORY, 99, -12};
  const int32_t tokens[] = {-1, V, MASK, INT32_MAX, INT32_MIN};
  const float values[] = {NAN, INFINITY, -INFINITY};
  dlm_policy policy;
  for (int32_t pass = 0; pass < 3; ++pass) {
    for (size_t i = 0; i < 5 + 5 + 3 + 2 * 3; ++i) {
      dlm_request options = options_of(&policy, 12);
      dlm_status wanted = DLM_ENGINE_FAILED;
      policy.cache = pass == 2 ? "dual" : "none";
      f.bad_at = f.passes + pass;
      if (i < 5) {
        wanted = f.bad_status = statuses[i];
      } else if (i < 10) {
        f.is_token_bad = 1;
        f.bad_token = tokens[i - 5];
      } else {
        f.is_prob_bad = i < 13;
        f.is_entropy_bad = i >= 13;
        f.bad_value = values[(i - 10) % 3];
        if (i >= 13) policy.score = "entropy";
        if (i >= 16) policy.commit = "entropy_bound";
      }
      int32_t canvas[15] = {1, 2, 3};
      size_t length = 99;
      const dlm_step* step;
      const int32_t before = f.passes;
      policy.entropy_bound = 0; /* each pass commits 1 or 2 positions, so there is a third pass */
      SESSION_STATUS(generate(session, &options, canvas, 3, NULL, &length), wanted);
      CLAIM(f.passes == before + pass + 1 && length == 0 && canvas[3] == 0);
      f.bad_at = f.passes;
      SESSION_STATUS(start(session, &options, prompt, 3), DLM_OK);
      SESSION_STATUS(dlm_session_step(session, &step), wanted);
      CLAIM(step == NULL);
      SESSION_STATUS(dlm_session_step(session, &step), wanted); /* the request has ended */
      f.bad_at = -1;
      f.bad_status = DLM_OK;
      f.is_token_bad = f.is_prob_bad = f.is_entropy_bad = 0;
      is_usable(session, &f, __LINE__);
    }
  }
  dlm_session_destroy(session);
  dlm_bundle_destroy(bundle);
}

/* ---- The loop ---- */

static void test_counts(void) {
  fake f = make_fake();
  f.shift = 1;
  dlm_bundle* bundle = open_fake(&f);
  dlm_session* session = open_session(bundle);
  dlm_policy policy;
  dlm_request options = options_of(&policy, 0);
  int32_t tokens[LONGEST] = {1, 2, 3};
  dlm_stats stats;
  size_t length = 0;
  SESSION_STATUS(generate(session, &options, tokens, 3, &stats, &length), DLM_OK);
  CLAIM(length == 3 && stats.nfe == 0 && stats.cache_bytes == 0 &&
        f.passes == 0); /* without new tokens, there is no pass */
  options.max_new_tokens = 16;
  policy.cache = "dual";
  SESSION_STATUS(generate(session, &options, tokens, 3, &stats, &length), DLM_OK);
  /* Keys and values of 19 positions, stored once. */
  CLAIM(length == 19 && stats.nfe == 16 &&
        stats.cache_bytes == 2 * LAYERS * HEADS * HEAD_SIZE * 4 * 19);
  options.steps = 6;
  SESSION_STATUS(generate(session, &options, tokens, 3, &stats, &length), DLM_OK);
  CLAIM(stats.nfe == 6 && stats.prefill_s > 0 && stats.passes_s > 0 && f.broken_promises == 0);
  CLAIM(stats.selection_s > 0 && stats.cache_s > 0);
  CLAIM(stats.prefill_s + stats.passes_s + stats.selection_s + stats.cache_s <=
        stats.total_s); /* no time is counted twice */
  policy.cache = "none";
  SESSION_STATUS(generate(session, &options, tokens, 3, &stats, &length), DLM_OK);
  CLAIM(stats.prefill_s == 0 && stats.cache_s == 0 && stats.passes_s > 0 && stats.selection_s > 0);
  policy.cache = "dual";
  f.eos_at = 5; /* in the first of two blocks */
  options.steps = 0;
  SESSION_STATUS(generate(session, &options, tokens, 3, &stats, &length), DLM_OK);
  CLAIM(length == 19 && stats.nfe == 8 && tokens[5] == EOS && tokens[11] == EOS &&
        tokens[18] == EOS && tokens[10] != EOS);
  options.policy = NULL; /* for a callback bundle, NULL means the policy of dlm_policy_init */
  SESSION_STATUS(generate(session, &options, tokens, 3, &stats, &length), DLM_OK);
  CLAIM(length == 19 && stats.nfe == 16);
  dlm_session_destroy(session);
  dlm_bundle_destroy(bundle);
}

static int last_was(const fake* f, int32_t batch, int32_t tokens, int32_t cached, int32_t rows) {
  return f->last[0] == batch && f->last[1] == tokens && f->last[2] == cached && f->last[3] == rows;
}

static void test_timed_passes_are_those_that_were_asked_for(void) {
  fake f = make_fake();
  dlm_bundle* bundle = open_fake(&f);
  dlm_session* session = open_session(bundle);
  double seconds[3] = {-1, -1, -1};
#define REFUSE(...) \
  SESSION_STATUS(dlm_session_time_passes(session, 1, __VA_ARGS__), DLM_INVALID_ARGUMENT)
  CLAIM(dlm_session_time_passes(NULL, 1, 1, 0, 1, seconds, 1) == DLM_INVALID_ARGUMENT);
  REFUSE(0, 0, 1, seconds, 1);
  REFUSE(-1, 0, 1, seconds, 1);
  REFUSE(4, -1, 4, seconds, 1);
  REFUSE(4, 0, 0, seconds, 1);
  REFUSE(4, 0, 5, seconds, 1);
  REFUSE(LONGEST + 1, 0, 1, seconds, 1);
  REFUSE(1, LONGEST, 1, seconds, 1);
  REFUSE(INT32_MAX, INT32_MAX, 1, seconds, 1);
  REFUSE(4, 0, 4, NULL, 1);
#undef REFUSE
  CLAIM(f.passes == 0 && seconds[0] == -1);
  SESSION_STATUS(dlm_session_time_passes(session, 1, 4, 0, 3, seconds, 2), DLM_OK);
  CLAIM(f.passes == 2 && last_was(&f, 1, 4, 0, 3) && seconds[0] > 0 && seconds[1] > 0 &&
        seconds[2] == -1);
  SESSION_STATUS(dlm_session_time_passes(session, 1, 4, LONGEST - 4, 4, seconds, 3), DLM_OK);
  CLAIM(f.passes == 6 && last_was(&f, 1, 4, LONGEST - 4, 4) &&
        seconds[2] > 0); /* and one pass that fills the cache */
  for (int32_t batch = -1; batch < 1; ++batch)
    SESSION_STATUS(dlm_session_time_passes(session, batch, 4, 0, 4, seconds, 1),
                   DLM_INVALID_ARGUMENT);
  SESSION_STATUS(dlm_session_time_passes(session, INT32_MAX, 4, 0, 4, seconds, 1),
                 DLM_INVALID_ARGUMENT);
  SESSION_STATUS(dlm_session_time_passes(session, 1, 4, 4, 1, NULL, 0), DLM_OK);
  CLAIM(f.passes == 6 && f.broken_promises == 0); /* the arguments were only checked */
  SESSION_STATUS(dlm_session_time_passes(session, MOST, 4, 4, 2, seconds, 1), DLM_OK);
  CLAIM(f.passes == 8 && last_was(&f, MOST, 4, 4, 2) && f.batches[MOST] == 2 &&
        f.broken_promises == 0);
  dlm_policy policy;
  const dlm_request options = options_of(&policy, 8);
  const dlm_step* step;
  SESSION_STATUS(start(session, &options, prompt, 3), DLM_OK);
  SESSION_STATUS(dlm_session_time_passes(session, 1, 4, 4, 1, seconds, 1), DLM_OK);
  SESSION_STATUS(dlm_session_step(session, &step),
                 DLM_INVALID_ARGUMENT); /* the timing call ended the running request */
  f.bad_at = f.passes + 1;
  f.bad_status = DLM_ENGINE_FAILED;
  SESSION_STATUS(dlm_session_time_passes(session, 1, 4, 4, 1, seconds, 1), DLM_ENGINE_FAILED);
  is_usable(session, &f, __LINE__);
  dlm_session_destroy(session);
  dlm_bundle_destroy(bundle);
  dlm_denoiser plain = describe(&f);
  plain.has_cache = 0;
  bundle = NULL;
  STATUS(dlm_bundle_from_callback(&plain, run, &f, NULL, 0, &bundle), DLM_OK);
  session = open_session(bundle);
  SESSION_STATUS(dlm_session_time_passes(session, 1, 4, 4, 1, seconds, 1), DLM_UNSUPPORTED);
  SESSION_STATUS(dlm_session_time_passes(session, 1, 4, 0, 1, seconds, 1), DLM_OK);
  dlm_session_destroy(session);
  dlm_bundle_destroy(bundle);
}

/* ---- Results of requests, and reasons why they end ---- */

static int32_t cancel_at_two(void* user, const dlm_step* step) {
  if (step->nfe == 2) dlm_session_cancel(user, 0);
  return 0;
}

static void* cancel_all(void* user) {
  dlm_session_cancel(user, DLM_ALL_REQUESTS);
  return NULL;
}

/* The result of the last request of the session. */
static int ended(dlm_session* session, int32_t finish, int32_t nfe, int32_t completion,
                 size_t undecided) {
  const dlm_result* result;
  size_t open = 0, unsaid = 0;
  if (!SESSION_STATUS(dlm_session_result(session, 0, &result), DLM_OK)) return 0;
  for (size_t i = 0; i < result->length; ++i)
    open += result->undecided[i], unsaid += isnan(result->log_probs[i]) != 0;
  return result->struct_size == sizeof *result && result->finish == finish &&
         result->stats->nfe == nfe && result->prompt_tokens == 3 &&
         result->completion_tokens == completion && result->length == 11 && open == undecided &&
         unsaid >= 3 + undecided;
}

static void test_results_and_what_ends_requests(void) {
  fake f = make_fake();
  dlm_bundle* bundle = open_fake(&f);
  dlm_session* session = open_session(bundle);
  dlm_policy policy;
  dlm_request options = options_of(&policy, 8);
  const dlm_result* result = garbage;
  const dlm_step* step;
  size_t length = 0;
  SESSION_STATUS(dlm_session_result(session, 0, &result),
                 DLM_INVALID_ARGUMENT); /* no request has ended */
  CLAIM(result == NULL);
  SESSION_STATUS(dlm_session_result(session, 0, NULL), DLM_INVALID_ARGUMENT);
  CLAIM(dlm_session_result(NULL, 0, &result) == DLM_INVALID_ARGUMENT);
  dlm_session_cancel(NULL, 0);
  dlm_session_cancel(session, 0); /* no request is running */
  int32_t tokens[LONGEST] = {1, 2, 3};
  SESSION_STATUS(generate(session, &options, tokens, 3, NULL, &length), DLM_OK);
  CLAIM(ended(session, DLM_FINISH_LENGTH, 8, 8, 0));
  SESSION_STATUS(dlm_session_result(session, 1, &result), DLM_INVALID_ARGUMENT);
  f.eos_at = 6;
  SESSION_STATUS(generate(session, &options, tokens, 3, NULL, &length), DLM_OK);
  CLAIM(ended(session, DLM_FINISH_STOP, 8, 3, 0));
  f.eos_at = NOWHERE;
  options.max_steps = 3;
  SESSION_STATUS(generate(session, &options, tokens, 3, NULL, &length), DLM_OK);
  CLAIM(ended(session, DLM_FINISH_STEPS, 3, 8, 5));
  for (int32_t i = 3; i < 11; ++i)
    CLAIM(tokens[i] == token_at(&f, i)); /* undecided positions have the proposed token */
  options.max_steps = 0;
  options.deadline_ms = 1e-9;
  SESSION_STATUS(generate(session, &options, tokens, 3, NULL, &length), DLM_OK);
  CLAIM(ended(session, DLM_FINISH_DEADLINE, 0, 0, 8) && tokens[10] == EOS);
  options.deadline_ms = 1e9;
  options.on_step = cancel_at_two;
  options.user = session;
  SESSION_STATUS(generate(session, &options, tokens, 3, NULL, &length), DLM_OK);
  CLAIM(ended(session, DLM_FINISH_CANCELLED, 2, 8, 6));
  SESSION_STATUS(start(session, &options, prompt, 3), DLM_OK);
  SESSION_STATUS(dlm_session_step(session, &step), DLM_OK);
  SESSION_STATUS(dlm_session_result(session, 0, &result),
                 DLM_INVALID_ARGUMENT); /* the request is running */
  pthread_t thread;
  CLAIM(pthread_create(&thread, NULL, cancel_all, session) == 0 && pthread_join(thread, NULL) == 0);
  const int32_t passes = f.passes;
  SESSION_STATUS(dlm_session_step(session, &step), DLM_OK);
  CLAIM(step->done == 1 && step->nfe == 1 && f.passes == passes &&
        ended(session, DLM_FINISH_CANCELLED, 1, 8, 7));
  is_usable(session, &f, __LINE__);
  /* With sampling and guidance, passes return all logits and run two canvases. */
  policy.select = "sample";
  policy.temperature = 0.5;
  policy.cfg_scale = 2;
  policy.cache = "dual";
  options.on_step = NULL;
  SESSION_STATUS(generate(session, &options, tokens, 3, NULL, &length), DLM_OK);
  CLAIM(f.last[0] == 2 && f.broken_promises == 0);
  dlm_session_destroy(session);
  dlm_bundle_destroy(bundle);
}

/* ---- Batches ---- */

/* Requests with canvases of the same length and blocks of eight tokens. The requests may have
 * different numbers of mask tokens in a block. canvases[i] contains the given tokens of request
 * i. */
typedef struct {
  int32_t canvases[MOST][LONGEST];
  size_t counts[MOST];   /* numbers of given tokens */
  size_t lengths[MOST];  /* output: lengths of the canvases */
  dlm_stats stats[MOST]; /* output */
} several;

/* Runs the first `count` requests. If the call does not fail, copies their canvases to
 * s->canvases. */
static dlm_status generate_batch(dlm_session* session, const dlm_request* options, several* s,
                                 size_t count, int32_t max_batch) {
  dlm_request requests[MOST];
  const dlm_request* pointers[MOST];
  for (size_t i = 0; i < count; ++i) {
    if (options != NULL) requests[i] = of(options, s->canvases[i], s->counts[i]);
    pointers[i] = options == NULL ? NULL : &requests[i];
  }
  const dlm_status status = dlm_session_generate_batch(session, pointers, count, max_batch);
  for (size_t i = 0; status == DLM_OK && i < count; ++i) {
    const dlm_result* result = NULL;
    if (!STATUS(dlm_session_result(session, i, &result), DLM_OK)) continue;
    memcpy(s->canvases[i], result->tokens, result->length * sizeof(int32_t));
    s->lengths[i] = result->length;
    s->stats[i] = *result->stats;
  }
  return status;
}

static void prepare(several* s, size_t given) {
  memset(s, 0, sizeof *s);
  for (int32_t i = 0; i < MOST; ++i) {
    for (int32_t at = 0; at < LONGEST; ++at)
      s->canvases[i][at] = at < 3 ? i : i > 0 && at > 3 && at % (i + 2) == 0 ? 7 : MASK;
    s->counts[i] = given;
  }
}

/* Checks that a batch is rejected with a message that contains `says`, and that the session still
 * works. */
static void refuse_batch(dlm_session* session, const fake* f, const dlm_request* options,
                         several* s, size_t count, int32_t max_batch, dlm_status wanted,
                         const char* says, int line) {
  has_status(generate_batch(session, options, s, count, max_batch), wanted, session, line);
  claim(strstr(dlm_session_last_error(session), says) != NULL, says, line);
  is_usable(session, f, line);
}

static void test_wrong_batches_are_refused_by_number(void) {
  fake f = make_fake();
  dlm_bundle* bundle = open_fake(&f);
  dlm_session* session = open_session(bundle);
  dlm_policy policy, other;
  const dlm_request good = options_of(&policy, 0);
  several s;
  prepare(&s, 40);
  CLAIM(generate_batch(NULL, &good, &s, 1, 1) == DLM_INVALID_ARGUMENT);
  SESSION_STATUS(dlm_session_generate_batch(session, NULL, 1, 1), DLM_INVALID_ARGUMENT);
  SESSION_STATUS(dlm_session_generate_batch(session, NULL, 0, 1),
                 DLM_OK); /* there are no requests */
#define REFUSE(options, says) \
  refuse_batch(session, &f, options, &s, MOST, 2, DLM_INVALID_ARGUMENT, says, __LINE__)
  REFUSE(NULL, "request 0: request is NULL");
  refuse_batch(session, &f, &good, &s, MOST, 0, DLM_INVALID_ARGUMENT, "max_batch = 0", __LINE__);
  refuse_batch(session, &f, &good, &s, MOST, INT32_MIN, DLM_INVALID_ARGUMENT, "max_batch",
               __LINE__);
  refuse_batch(session, &f, &good, &s, MOST, 4097, DLM_INVALID_ARGUMENT, "1..4096", __LINE__);
  dlm_request bad = good;
  bad.deadline_ms = (double)NAN;
  REFUSE(&bad, "request 0: deadline_ms = nan is outside");
  bad = good;
  bad.max_steps = -1;
  REFUSE(&bad, "max_steps = -1 is negative");
  bad = good;
  bad.max_new_tokens = DLM_DEFAULT_NEW_TOKENS, bad.new_tokens = 50;
  REFUSE(&bad, "request 0: a canvas of 90 tokens");
  bad = good;
  bad.steps = 1;
  REFUSE(&bad, "request 0: steps = 1");
  s.counts[2] = 0;
  REFUSE(&good, "request 2: the canvas is empty");
  prepare(&s, 40);
  s.canvases[1][5] = V;
  REFUSE(&good, "request 1: token id 50 at position 5");
#undef REFUSE
  /* Each request has its own options, and a callback gets only the steps of its own request. */
  prepare(&s, 40);
  dlm_request one = of(&good, s.canvases[0], 40), two = options_of(&other, 0);
  two = of(&two, s.canvases[0], 40);
  const dlm_request* const both[] = {&one, &two};
  watcher watchers[] = {{0, 0, NULL, {0}}, {0, 0, NULL, {0}}};
  one.on_step = two.on_step = watch, one.user = &watchers[0], two.user = &watchers[1];
  other.steps_per_block = 1, two.max_steps = 4;
  const dlm_result* result = NULL;
  SESSION_STATUS(dlm_session_generate_batch(session, both, 2, 2), DLM_OK);
  SESSION_STATUS(dlm_session_result(session, 1, &result), DLM_OK);
  CLAIM(watchers[0].calls == 37 && watchers[1].calls == 4 && result->stats->nfe == 4 &&
        result->finish == DLM_FINISH_STEPS);
  /* Make a pass of the second batch of two fail in the last row of its last request. */
  const int32_t tokens[] = {-1, V, MASK};
  for (size_t i = 0; i < 4; ++i) {
    int32_t per_batch = 0;
    prepare(&s, 40);
    if (SESSION_STATUS(generate_batch(session, &good, &s, 2, 2), DLM_OK))
      per_batch =
          s.stats[0]
              .nfe; /* the passes of the slowest request, which has no given token in the middle */
    prepare(&s, 40);
    memcpy(s.canvases[2], s.canvases[0], sizeof s.canvases[0]);
    memcpy(s.canvases[3], s.canvases[0], sizeof s.canvases[0]);
    f.bad_at = f.passes + per_batch + 1;
    f.bad_status = i == 3 ? DLM_OUT_OF_MEMORY : DLM_OK;
    f.is_token_bad = i < 3;
    f.bad_token = tokens[i % 3];
    refuse_batch(session, &f, &good, &s, 4, 2, i == 3 ? DLM_OUT_OF_MEMORY : DLM_ENGINE_FAILED,
                 i == 3 ? "OUT_OF_MEMORY" : "request 3: the denoiser predicted the invalid token",
                 __LINE__);
    /* If the pass itself fails, both of its requests fail. Otherwise only one fails. The other
     * requests finish. */
    SESSION_STATUS(generate_batch(session, &good, &s, 0, 2), DLM_OK);
    f.bad_at = f.passes + per_batch + 1;
    const dlm_result* results[4];
    dlm_request requests[4];
    const dlm_request* pointers[4];
    for (size_t n = 0; n < 4; ++n)
      requests[n] = of(&good, s.canvases[n], 40), pointers[n] = &requests[n];
    CLAIM(dlm_session_generate_batch(session, pointers, 4, 2) != DLM_OK);
    for (size_t n = 0; n < 4; ++n)
      SESSION_STATUS(dlm_session_result(session, n, &results[n]), DLM_OK);
    CLAIM(results[0]->status == DLM_OK && results[1]->status == DLM_OK &&
          results[3]->status != DLM_OK);
    CLAIM((results[2]->status == DLM_OK) == (i < 3) && results[3]->message[0] != '\0');
    f.bad_at = -1;
    f.bad_status = DLM_OK;
    f.is_token_bad = 0;
  }
  dlm_session_destroy(session);
  dlm_bundle_destroy(bundle);
}

static void test_requests_are_together_where_they_fit(void) {
  fake f = make_fake();
  dlm_bundle* bundle = open_fake(&f);
  dlm_session* session = open_session(bundle);
  dlm_policy policy;
  const dlm_request options = options_of(&policy, 8);
  several s;
  policy.cache = "dual";
  prepare(&s, 3);
  SESSION_STATUS(generate_batch(session, &options, &s, MOST, 2), DLM_OK);
  CLAIM(f.batches[2] == 16 && f.batches[1] == 8 &&
        f.passes == 24); /* batches of two, two and one */
  memset(f.batches, 0, sizeof f.batches);
  prepare(&s, 3);
  s.counts[1] = s.counts[3] = 2; /* shorter canvases also run together */
  SESSION_STATUS(generate_batch(session, &options, &s, MOST, 8), DLM_OK);
  CLAIM(f.batches[3] == 8 && f.batches[2] == 8);
  CLAIM(s.lengths[0] == 11 && s.lengths[1] == 10);
  memset(f.batches, 0, sizeof f.batches);
  prepare(&s, 19);
  for (int32_t at = 3; at < 11; ++at)
    s.canvases[2][at] = 5; /* so the first block with mask tokens is the second block */
  SESSION_STATUS(generate_batch(session, &options, &s, 3, 8), DLM_OK);
  CLAIM(f.batches[2] > 0 && f.batches[1] > 0 && f.batches[3] == 0 && f.broken_promises == 0);
  memset(f.batches, 0, sizeof f.batches);
  policy.cache =
      "none"; /* without a cache, rows need not be moved in the same way for all requests */
  prepare(&s, 19);
  for (int32_t at = 3; at < 11; ++at) s.canvases[2][at] = 5;
  SESSION_STATUS(generate_batch(session, &options, &s, 3, 8), DLM_OK);
  CLAIM(f.batches[3] > 0 && f.batches[1] > 0);
  dlm_session_destroy(session);
  dlm_bundle_destroy(bundle);
}

int main(int argc, char** argv) {
  if (argc != 2) {
    fprintf(stderr, "usage: native_driver BUNDLE\n");
    return 2;
  }
  setvbuf(stdout, NULL, _IOLBF, 0); /* claims are printed at once, because a sanitizer may abort */
  test_static_functions();
  test_open_refuses(argv[1]);
  test_engines_by_name(argv[1]);
  test_messages_stay_inside_their_buffer();
  test_denoisers_out_of_range_are_refused();
  test_presets(argv[1]);
  test_wrong_requests_are_refused();
  test_wrong_logits_requests_are_refused();
  test_steps();
  test_step_callbacks();
  test_every_call_asks_before_each_of_its_passes();
  test_failing_passes_end_the_request();
  test_counts();
  test_timed_passes_are_those_that_were_asked_for();
  test_results_and_what_ends_requests();
  test_wrong_batches_are_refused_by_number();
  test_requests_are_together_where_they_fit();
  printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}
