package dlm

import (
	"context"
	"math"
	"os"
	"strings"
	"sync"
	"testing"
	"time"
)

// $DLM_BUNDLE is the bundle under test. $DLM_EFFORT_BUNDLE is a bundle with effort levels.
// $DLM_AUTOMATON is a constraint file for their vocabulary that allows "yes" and "no".
const prompt = "turn on the kitchen lights"

var (
	ctx = context.Background()
	few = Options{MaxNewTokens: 40}
)

func open(t *testing.T, name string) *Bundle {
	bundle, err := Open(os.Getenv(name), 1)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(bundle.Close)
	return bundle
}

func session(t *testing.T, bundle *Bundle) *Session {
	made, err := bundle.NewSession()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(made.Close)
	return made
}

func automaton(t *testing.T) *Automaton {
	opened, err := OpenAutomaton(os.Getenv("DLM_AUTOMATON"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(opened.Close)
	return opened
}

func generate(t *testing.T, s *Session, prompt string, options Options) *Generation {
	t.Helper()
	out, err := s.GenerateText(ctx, prompt, options)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func preset(t *testing.T, bundle *Bundle, name string) *Policy {
	t.Helper()
	policy, err := bundle.Preset(name)
	if err != nil {
		t.Fatal(err)
	}
	return policy
}

func TestDefaultOptionsGenerateAsManyTokensAsTheBundleSays(t *testing.T) {
	bundle := open(t, "DLM_BUNDLE")
	s := session(t, bundle)
	out := generate(t, s, prompt, Options{})
	if out.Text == "" || out.Text != generate(t, s, prompt, Options{MaxNewTokens: bundle.MaxNewTokens()}).Text {
		t.Errorf("by default: %q", out.Text)
	}
	if none := generate(t, s, prompt, Options{MaxNewTokens: NoNewTokens}); none.Passes != 0 || none.CompletionTokens != 0 {
		t.Errorf("without new tokens: %+v", none)
	}
	if exact := generate(t, s, "", Options{NewTokens: 7}); exact.Passes == 0 || exact.CompletionTokens > 7 {
		t.Errorf("with 7 new tokens: %+v", exact)
	}
	both := Options{NewTokens: 7, MaxNewTokens: 40}
	if _, err := s.GenerateText(ctx, "", both); err == nil || !strings.Contains(err.Error(), "both new_tokens = 7") {
		t.Error(err)
	}
}

func TestPresetsEffortLevelsAndChangedFieldsChooseTheLoop(t *testing.T) {
	bundle := open(t, "DLM_BUNDLE")
	s := session(t, bundle)
	passes := func(policy *Policy) int {
		return generate(t, s, prompt, Options{MaxNewTokens: 40, Policy: policy}).Passes
	}
	fast, changed := preset(t, bundle, "fast-dllm"), preset(t, bundle, "fast-dllm")
	if err := changed.Set("threshold", 1); err != nil {
		t.Fatal(err)
	}
	if passes(fast) >= passes(preset(t, bundle, "llada")) || passes(fast) >= passes(changed) {
		t.Error("fast-dllm is not the fastest")
	}
	if _, err := bundle.Preset("slow"); err == nil || !strings.Contains(err.Error(), "llada, fast-dllm") {
		t.Error(err)
	}
	levels := open(t, "DLM_EFFORT_BUNDLE")
	instant, err := levels.Effort("instant")
	if err != nil {
		t.Fatal(err)
	}
	high, err := levels.Effort("high")
	if err != nil {
		t.Fatal(err)
	}
	if passes(instant) >= passes(high) {
		t.Error("instant is not faster than high")
	}
	if err := changed.SetChoice("select", "sample"); err != nil {
		t.Error(err)
	}
	for name, value := range map[string]float64{"temperature": 1.5, "seed": 7} {
		if err := changed.Set(name, value); err != nil {
			t.Error(err)
		}
	}
	draws := Options{MaxNewTokens: 40, Policy: changed}
	if first := generate(t, s, "go", draws).Text; first != generate(t, s, "go", draws).Text {
		t.Error("a seed gives two texts")
	}
	for name, value := range map[string]float64{"threshold": 2, "top_k": 1.5, "seed": 1 << 64, "temperature": -1, "select": 1, "x": 1} {
		if changed.Set(name, value) == nil {
			t.Errorf("%s = %v is accepted", name, value)
		}
	}
	if err := changed.SetChoice("select", "best"); err == nil || !strings.Contains(err.Error(), "argmax, sample") {
		t.Error(err)
	}
}

func TestATextEndsBeforeAStopString(t *testing.T) {
	bundle := open(t, "DLM_BUNDLE")
	s := session(t, bundle)
	whole := generate(t, s, prompt, few).Text
	wanted := whole[:strings.Index(whole, "kitchen")]
	stopped := Options{MaxNewTokens: 40, StopStrings: []string{"none of these", "kitchen"}}
	if out := generate(t, s, prompt, stopped); out.Text != wanted || out.Finish != "stop" {
		t.Errorf("%+v", out)
	}
	scheduler, err := bundle.NewScheduler()
	if err != nil {
		t.Fatal(err)
	}
	defer scheduler.Close()
	job, err := scheduler.SubmitText(prompt, stopped)
	if err != nil {
		t.Fatal(err)
	}
	defer job.Close()
	if out, err := job.Wait(ctx); err != nil || out.Text != wanted {
		t.Errorf("%+v: %v", out, err)
	}
}

func TestAConstraintIsOfItsRequestAlone(t *testing.T) {
	s := session(t, open(t, "DLM_BUNDLE"))
	data, err := os.ReadFile(os.Getenv("DLM_AUTOMATON"))
	if err != nil {
		t.Fatal(err)
	}
	read, err := ReadAutomaton(data)
	if err != nil {
		t.Fatal(err)
	}
	defer read.Close()
	free := generate(t, s, prompt, few).Text
	for _, constraint := range []*Automaton{automaton(t), read} {
		if text := generate(t, s, prompt, Options{Constraint: constraint}).Text; text != "yes" && text != "no" {
			t.Errorf("constrained: %q", text)
		}
		if text := generate(t, s, prompt, few).Text; text != free {
			t.Errorf("afterwards: %q", text)
		}
	}
	if _, err := OpenAutomaton("/no/such/file"); err == nil || !strings.HasPrefix(err.Error(), "NOT_FOUND: /no/such/file") {
		t.Error(err)
	}
	if _, err := ReadAutomaton([]byte("DLM")); err == nil {
		t.Error("a damaged file is accepted")
	}
}

func TestAConstraintIsCompiledForABundle(t *testing.T) {
	bundle := open(t, "DLM_BUNDLE")
	s := session(t, bundle)
	contents := map[Kind]string{
		Regex: "yes|no", Enum: `["yes", "no"]`, Grammar: `root ::= "yes" | "no"`,
		Tree: `{"either": [{"text": "yes"}, {"regex": "no"}]}`, Schema: `{"enum": ["yes", "no"]}`,
	}
	for kind, content := range contents {
		made, err := bundle.Compile(kind, content)
		if err != nil {
			t.Fatal(err)
		}
		defer made.Close()
		text := strings.Trim(generate(t, s, prompt, Options{Constraint: made}).Text, "\"")
		if text != "yes" && text != "no" {
			t.Errorf("%s: %q", content, text)
		}
	}
	decision, err := bundle.Compile(Decisions, `{"parts": [["yes", "no"]], "is_open": false}`)
	if err != nil {
		t.Fatal(err)
	}
	defer decision.Close()
	probs := generate(t, s, prompt, Options{Constraint: decision}).OptionProbs
	if len(probs) != 2 || math.Abs(probs[0]+probs[1]-1) > 1e-9 {
		t.Error(probs)
	}
	object, err := bundle.Compile(JSONObject, "")
	if err != nil {
		t.Fatal(err)
	}
	object.Close()
	if _, err := bundle.Compile(Grammar, "root ::= x"); err == nil || !strings.Contains(err.Error(), "rule 'x' is not defined") {
		t.Error(err)
	}
}

func TestRequestsOfASchedulerComeToWhatEachComesToAlone(t *testing.T) {
	bundle := open(t, "DLM_BUNDLE")
	s := session(t, bundle)
	scheduler, err := bundle.NewScheduler()
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	texts := make([]string, 6)
	prompts := []string{"play jazz", prompt, "go"}
	options := []Options{{Constraint: automaton(t)}, {MaxNewTokens: 40, Policy: preset(t, bundle, "fast-dllm")}}
	for i := range texts {
		all.Add(1)
		go func(i int) {
			defer all.Done()
			job, err := scheduler.SubmitText(prompts[i/2], options[i%2])
			if err != nil {
				t.Error(err)
				return
			}
			defer job.Close()
			out, err := job.Wait(ctx)
			if err != nil {
				t.Error(err)
				return
			}
			texts[i] = out.Text
		}(i)
	}
	all.Wait()
	for i, text := range texts {
		if wanted := generate(t, s, prompts[i/2], options[i%2]).Text; text != wanted {
			t.Errorf("%q, alone %q", text, wanted)
		}
	}
	chat := []Message{{"user", prompt}}
	job, err := scheduler.SubmitChat(chat, few)
	if err != nil {
		t.Fatal(err)
	}
	defer job.Close()
	together, err := job.Wait(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if wanted, err := s.GenerateChat(ctx, chat, few); err != nil || together.Text != wanted.Text {
		t.Errorf("%q: %v", together.Text, err)
	}

	long := Options{MaxNewTokens: 400, Policy: preset(t, bundle, "llada")}
	short, cancel := context.WithTimeout(ctx, time.Millisecond)
	defer cancel()
	ended, err := scheduler.SubmitText(prompt, long)
	if err != nil {
		t.Fatal(err)
	}
	defer ended.Close()
	if out, err := ended.Wait(short); err != nil || out.Finish != "cancelled" {
		t.Errorf("%+v: %v", out, err)
	}
	if _, err := scheduler.SubmitText(prompt, Options{OnText: func(string) bool { return true }}); err == nil {
		t.Error("OnText is accepted")
	}
	if _, err := scheduler.SubmitText(strings.Repeat("go ", 600), few); err == nil {
		t.Error("any length is accepted")
	}
	left, err := scheduler.SubmitText(prompt, long)
	if err != nil {
		t.Fatal(err)
	}
	defer left.Close()
	scheduler.Close()
	if out, err := left.Wait(ctx); err != nil || out.Finish != "cancelled" {
		t.Errorf("%+v: %v", out, err)
	}
}

func TestAPanicComesOutOfTheCallAndTheSessionGoesOn(t *testing.T) {
	s := session(t, open(t, "DLM_BUNDLE"))
	func() {
		defer func() {
			if recover() != "made to" {
				t.Error("no panic")
			}
		}()
		s.GenerateText(ctx, prompt, Options{OnText: func(string) bool { panic("made to") }})
	}()
	if _, err := s.GenerateText(ctx, prompt, Options{OnText: func(string) bool { return false }}); err == nil {
		t.Error("a callback that returns false ends nothing")
	}
	generate(t, s, prompt, few)
}
