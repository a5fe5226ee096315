{{/* A pod of `helm test` that runs a script with the router's image: (dict "root" $ "name" "script"). */}}
{{- define "infinite-llm.testPod" -}}
{{- $root := .root -}}
{{- $self := dict "root" $root "component" "test" "suffix" (printf "-test-%s" .name) -}}
apiVersion: v1
kind: Pod
metadata:
  {{- include "infinite-llm.metadata" $self | nindent 2 }}
  annotations:
    helm.sh/hook: test
    helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
spec:
  restartPolicy: Never
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- include "infinite-llm.podSecurity" $root | nindent 2 }}
  {{- with include "infinite-llm.pullSecrets" $root }}
  imagePullSecrets: {{- . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ .name }}
      image: {{ include "infinite-llm.image" (dict "root" $root "repository" $root.Values.router.image.repository) }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      {{- include "infinite-llm.containerSecurity" $root | nindent 6 }}
      env:
        - name: ROUTER
          value: http://{{ include "infinite-llm.name" $root }}-router:{{ $root.Values.router.service.httpPort }}
        - name: MODEL
          value: {{ include "infinite-llm.servedName" $root }}
      command: [python, -c]
      args:
        - | {{- .script | nindent 10 }}
      resources:
        requests: {cpu: 10m, memory: 32Mi}
        limits: {memory: 128Mi}
{{- end -}}
