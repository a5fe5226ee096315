{{/* The name of the custom resource, and the beginning of all other names. */}}
{{- define "infinite-llm.name" -}}
{{- default .Release.Name .Values.fullnameOverride | trunc 48 | trimSuffix "-" -}}
{{- end -}}

{{/* Labels that never change: (dict "root" $ "component" "router"). Workers get the same from the operator. */}}
{{- define "infinite-llm.selectorLabels" -}}
app.kubernetes.io/name: infinite-llm
app.kubernetes.io/instance: {{ include "infinite-llm.name" .root }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "infinite-llm.labels" -}}
{{ include "infinite-llm.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* name, namespace and labels of an object: (dict "root" $ "component" "router" "suffix" "-router"). */}}
{{- define "infinite-llm.metadata" -}}
name: {{ include "infinite-llm.name" .root }}{{ .suffix | default "" }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "infinite-llm.labels" . | nindent 2 }}
{{- end -}}

{{/* (dict "root" $ "repository" "infinite-llm-router") */}}
{{- define "infinite-llm.image" -}}
{{ .root.Values.image.prefix }}{{ .repository }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- end -}}

{{- define "infinite-llm.pullSecrets" -}}
{{- range .Values.image.pullSecrets }}
- name: {{ . }}
{{- end }}
{{- end -}}

{{/* Of every pod of the chart. */}}
{{- define "infinite-llm.podSecurity" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{/* Of every container of the chart. */}}
{{- define "infinite-llm.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{/* Where a pod may run; the argument is the component's values. */}}
{{- define "infinite-llm.placement" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}

{{/* On nodes of their own, where there are some: (dict "root" $ "component" "router"). */}}
{{- define "infinite-llm.spread" -}}
- maxSkew: 1
  topologyKey: kubernetes.io/hostname
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels:
      {{- include "infinite-llm.selectorLabels" . | nindent 6 }}
{{- end -}}

{{/* All gManagers; clients ask the one that leads. */}}
{{- define "infinite-llm.gmanagerAddress" -}}
{{- $name := printf "%s-gmanager" (include "infinite-llm.name" .) -}}
{{- if gt (int .Values.gmanager.replicas) 1 -}}
{{- $addresses := list -}}
{{- range $i := until (int .Values.gmanager.replicas) -}}
{{- $addresses = append $addresses (printf "%s-%d.%s:7000" $name $i $name) -}}
{{- end -}}
{{- join "," $addresses -}}
{{- else -}}
{{ $name }}:7000
{{- end -}}
{{- end -}}

{{- define "infinite-llm.servedName" -}}
{{- .Values.model.servedName | default (base .Values.model.name) -}}
{{- end -}}

{{/* The model in a pod: environment, mounts and volumes. */}}
{{- define "infinite-llm.modelEnv" -}}
{{- with .Values.model.download }}
{{- if .enabled }}
- name: XDG_CACHE_HOME
  value: /cache
{{- with .token }}
{{- if .existingSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ .existingSecret }}, key: {{ .key }}}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "infinite-llm.modelMounts" -}}
{{- if .Values.model.volume }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- if .Values.model.download.enabled }}
- {name: model-cache, mountPath: /cache}
{{- end }}
{{- end -}}

{{- define "infinite-llm.modelVolumes" -}}
{{- with .Values.model.volume }}
- name: models
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .Values.model.download.enabled }}
- name: model-cache
  {{- toYaml .Values.model.download.volume | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The Secret with Redis's password and its key, as "name key"; empty where there is none. */}}
{{- define "infinite-llm.redisSecret" -}}
{{- if .Values.redis.enabled -}}
{{ .Values.redis.auth.existingSecret | default (printf "%s-redis" (include "infinite-llm.name" .)) }} {{ .Values.redis.auth.key }}
{{- else if .Values.externalRedis.existingSecret -}}
{{ .Values.externalRedis.existingSecret }} {{ .Values.externalRedis.key }}
{{- end -}}
{{- end -}}

{{/* The Secret with the data plane's certificate; empty where it speaks no TLS. */}}
{{- define "infinite-llm.dataPlaneSecret" -}}
{{- if eq .Values.dataPlaneTLS.mode "existingSecret" -}}
{{ .Values.dataPlaneTLS.existingSecret }}
{{- else if eq .Values.dataPlaneTLS.mode "certManager" -}}
{{ include "infinite-llm.name" . }}-data-plane
{{- end -}}
{{- end -}}

{{/*
The custom resource's replicas; empty where the field is not to be rendered.

Whoever scales (kubectl, an autoscaler) owns the live number, so that an upgrade must repeat it: a
constant would conflict with it or undo it. Where nobody but Helm could own it, it is rendered at the
install; where it was rendered once it must stay rendered, since a field that Helm drops falls back to
the default of 1.
*/}}
{{- define "infinite-llm.workerReplicas" -}}
{{- $w := .Values.worker -}}
{{- $isFree := or $w.autoscaling.enabled $w.keda.enabled (kindIs "invalid" $w.replicas) -}}
{{- $live := lookup "infinite-llm.io/v1alpha1" "InfiniteLLM" .Release.Namespace (include "infinite-llm.name" .) -}}
{{- if $live -}}
  {{- $isOwned := false -}}
  {{- range $live.metadata.managedFields -}}
    {{- if and (hasPrefix "helm" .manager) (not .subresource) (hasKey (dig "f:spec" dict .fieldsV1) "f:replicas") -}}
      {{- $isOwned = true -}}
    {{- end -}}
  {{- end -}}
  {{- if or $isFree $w.preserveReplicas -}}
    {{- if or $isOwned (not $isFree) -}}{{ int $live.spec.replicas }}{{- end -}}
  {{- else -}}{{ int $w.replicas }}{{- end -}}
{{- else if not $isFree -}}{{ int $w.replicas }}{{- end -}}
{{- end -}}

{{/* What selects this release in PromQL; the pod monitor brings the second label. */}}
{{- define "infinite-llm.metricLabels" -}}
namespace="{{ .Release.Namespace }}",app_kubernetes_io_instance="{{ include "infinite-llm.name" . }}"
{{- end -}}

{{/* Annotations of what lives only while the definitions are brought up to date; the argument is a weight. */}}
{{- define "infinite-llm.upgradeHook" -}}
helm.sh/hook: pre-upgrade
helm.sh/hook-weight: {{ . | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end -}}
