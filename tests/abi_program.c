/* A program of some dlm_runtime.h, run with libraries of other ones: abi_program BUNDLE ENGINE
 * Fills every struct that the library may write to, opens a callback bundle and BUNDLE, and prints what it gets. Bytes behind
 * the structs must stay as they are. Without NOVELTY it knows nothing but the header of its first release; with it, the
 * structs end with a field of that name. */
#include <stdio.h>
#include <string.h>

#include "dlm_runtime.h"

#define GUARDED(type)    \
  struct {               \
    type value;          \
    unsigned char behind[64]; \
  }

/* Both are 0x5A to the last byte until the library writes to value. */
#define GUARD(variable) memset(&(variable), 0x5A, sizeof(variable))
#define IS_WHOLE(variable) is_whole((variable).behind, #variable)

static void is_whole(const unsigned char *behind, const char *name) {
  for (int i = 0; i < 64; ++i) {
    if (behind[i] == 0x5A) continue;
    printf("%s: byte %d behind it was written\n", name, i);
    return;
  }
}

static dlm_status predict(void *user, const dlm_pass *pass) {
  (void)user;
  for (int32_t i = 0; i < pass->batch * pass->rows; ++i) {
    const int64_t position = pass->position_ids[pass->score_rows[i]];
    pass->top_tokens[2 * i] = (int32_t)(position % 7);
    pass->top_tokens[2 * i + 1] = 7;
    pass->top_probs[2 * i] = 0.75f;
    pass->top_probs[2 * i + 1] = 0.25f;
  }
  return DLM_OK;
}

static int32_t count_step(void *user, const dlm_step *step) {
  *(int32_t *)user += step->committed;
  return 0;
}

static void generate(dlm_bundle *bundle, const dlm_policy *policy) {
  int32_t tokens[10] = {3, 1}, committed = 0;
  size_t length = 0;
  char message[512];
  dlm_session *session = NULL;
  dlm_stats stats;
  GUARDED(dlm_generate_options) options;
  GUARD(options);
  dlm_generate_options_init(&options.value);
  IS_WHOLE(options);
  options.value.policy = policy;
  options.value.max_new_tokens = 8;
  options.value.on_step = count_step;
  options.value.user = &committed;
  if (dlm_session_create(bundle, message, sizeof message, &session)) {
    printf("%s\n", message);
    return;
  }
  const dlm_status status = dlm_session_generate(session, &options.value, tokens, 2, 10, &stats, &length);
  if (status != DLM_OK) printf("%s: %s\n", dlm_status_name(status), dlm_session_last_error(session));
  for (size_t i = 0; i < length; ++i) printf("%d ", (int)tokens[i]);
  if (status == DLM_OK) printf("committed %d in %d\n", (int)committed, (int)stats.nfe);
  dlm_session_destroy(session);
}

static void print_policy(const dlm_policy *p) {
  printf("%s %s %s %s %s %s %s %d %d %d %g %g %g %g %g %d\n", p->select, p->score, p->commit, p->compare, p->remask,
         p->cache, p->stop, (int)p->block_length, (int)p->steps_per_block, (int)p->refresh, p->threshold, p->factor,
         p->entropy_bound, p->timestep_eps, p->temperature, (int)p->seed);
#ifdef NOVELTY
  printf("novelty %d\n", (int)p->novelty);
#endif
}

int main(int argc, char **argv) {
  char message[512] = "";
  dlm_bundle *bundle = NULL;
  GUARDED(dlm_denoiser) denoiser;
  GUARDED(dlm_open_options) options;
  GUARDED(dlm_policy) policy;
  if (argc != 3) return 2;
  printf("ABI %d, header %d\n", (int)dlm_abi_version(), DLM_ABI_VERSION);

  GUARD(denoiser);
  dlm_denoiser_init(&denoiser.value);
  IS_WHOLE(denoiser);
  denoiser.value.vocab_size = 10;
  denoiser.value.mask_token_id = 9;
  denoiser.value.max_canvas_length = 16;
  denoiser.value.layers = denoiser.value.kv_heads = denoiser.value.head_size = 1;
  GUARD(policy);
  dlm_policy_init(&policy.value);
  IS_WHOLE(policy);
  print_policy(&policy.value);
  policy.value.commit = "threshold";
  if (dlm_bundle_from_callback(&denoiser.value, predict, NULL, message, sizeof message, &bundle)) printf("%s\n", message);
  if (bundle != NULL) {
    GUARD(denoiser); /* no size is set */
    dlm_bundle_denoiser(bundle, &denoiser.value);
    IS_WHOLE(denoiser);
    printf("%d %d\n", (int)denoiser.value.vocab_size, (int)denoiser.value.max_canvas_length);
    generate(bundle, NULL);
    generate(bundle, &policy.value);
  }
  dlm_bundle_destroy(bundle);

  GUARD(options);
  dlm_open_options_init(&options.value);
  IS_WHOLE(options);
  options.value.engine = argv[2];
  if (dlm_bundle_open(argv[1], &options.value, message, sizeof message, &bundle)) {
    printf("%s\n", message);
    return 0;
  }
  if (dlm_bundle_preset(bundle, "fast-dllm", message, sizeof message, &policy.value)) printf("%s\n", message);
  IS_WHOLE(policy);
  print_policy(&policy.value);
  if (strcmp(argv[2], "none") != 0) generate(bundle, &policy.value);
  dlm_bundle_destroy(bundle);
  return 0;
}
